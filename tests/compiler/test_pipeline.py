"""Pipelines: text form, contracts, the registry."""

from dataclasses import dataclass

import pytest

from autoshard.compiler.pass_base import Pass
from autoshard.compiler.pipeline import Pipeline
from autoshard.compiler.registry import parse_pass, register, registered
from autoshard.diagnostics import PassError
from autoshard.ir.program import Level


@register
@dataclass(frozen=True)
class MakeIce(Pass):
    """Freeze."""

    name = "test-make-ice"
    group = "test-cold"
    level = Level.FORWARD
    establishes = frozenset({"frozen"})

    depth: int = 1
    hard: bool = False

    def run(self, program, ctx):
        """Do nothing."""


@register
@dataclass(frozen=True)
class Skate(Pass):
    """Need ice."""

    name = "test-skate"
    group = "test-sport"
    level = Level.FORWARD
    assumes = frozenset({"frozen"})
    breaks = frozenset({"frozen"})

    def run(self, program, ctx):
        """Do nothing."""


def test_a_pass_prints_only_the_options_that_differ_and_parses_back():
    assert str(MakeIce()) == "test-make-ice"
    step = MakeIce(depth=3, hard=True)
    assert str(step) == "test-make-ice{depth=3,hard=True}"
    assert parse_pass(str(step)) == step


def test_a_pipeline_parses_back_from_its_print():
    pipeline = Pipeline((MakeIce(depth=2), Skate()))
    assert Pipeline.parse(str(pipeline) + "\n\n# a comment\n") == pipeline


def test_an_assumption_that_nothing_establishes_is_refused_before_running():
    with pytest.raises(PassError, match="no pass establishes it"):
        Pipeline((Skate(),)).check(())


def test_an_assumption_established_later_names_the_later_pass():
    with pytest.raises(PassError, match="'test-make-ice' establishes it but runs later"):
        Pipeline((Skate(), MakeIce())).check(())


def test_an_assumption_that_was_broken_names_the_culprit():
    with pytest.raises(PassError, match="which 'test-skate' broke"):
        Pipeline((MakeIce(), Skate(), Skate())).check(())


def test_a_pipeline_in_order_says_what_holds_at_its_end():
    assert Pipeline((MakeIce(),)).check({"canonical"}) == {"canonical", "frozen"}


def test_until_takes_a_pass_or_a_group_and_refuses_others():
    pipeline = Pipeline((MakeIce(), Skate(), MakeIce(depth=2)))
    assert pipeline.until("test-skate").passes == pipeline.passes[:2]
    assert pipeline.until("test-cold").passes == pipeline.passes
    with pytest.raises(PassError, match="no pass or group 'swim'"):
        pipeline.until("swim")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("test-skat", "did you mean 'test-skate'"),
        ("test-make-ice{deep=2}", "has no option 'deep'"),
        ("test-make-ice{depth=x}", "need int"),
        ("test-make-ice{", "is not a pass"),
    ],
)
def test_a_wrong_pass_text_says_what_is_wrong(text, message):
    with pytest.raises(PassError, match=message):
        parse_pass(text)


def test_a_class_imported_under_a_second_root_is_refused():
    cls = type("Twin", (MakeIce,), {"name": "test-twin", "__module__": "passes.twin"})
    with pytest.raises(PassError, match=r"import it as 'autoshard\.passes\.twin'"):
        register(cls)
    assert "test-twin" not in registered()
