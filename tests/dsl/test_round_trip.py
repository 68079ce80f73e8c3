"""Printing, formatting and reading agree: for random plans and for those in the examples."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from autoshard import Plan
from autoshard.diagnostics import PlanError
from autoshard.dsl.formatter import format_text
from autoshard.dsl.load import load, load_file
from autoshard.dsl.parse import parse
from autoshard.dsl.printer import to_text
from autoshard.plan import Plan as Data
from autoshard.source import Source
from tests.dsl.strategies import plans

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").rglob("*.plan"))
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(plans)
def test_a_printed_plan_reads_back_equal(plan: Data) -> None:
    loaded = load(Source("printed", to_text(plan)))
    assert loaded.errors == ()
    assert loaded.plan == plan


@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(plans)
def test_formatting_keeps_the_tree_and_is_idempotent(plan: Data) -> None:
    source = Source("printed", to_text(plan))
    formatted = format_text(source)
    assert parse(Source("f", formatted)).file == parse(source).file
    assert format_text(Source("f", formatted)) == formatted


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(plans)
def test_the_python_twin_holds_and_writes_the_same(plan: Data) -> None:
    twin = Plan.from_text(to_text(plan))
    assert twin == plan
    assert Plan.from_text(twin.to_text()) == plan
    assert hash(twin) == hash(plan)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_plans_are_right_well_formatted_and_print_back(path: Path) -> None:
    loaded = load_file(path)
    assert loaded.diagnostics == ()
    assert format_text(loaded.source) == loaded.source.text
    assert load(Source("printed", to_text(loaded.plan))).plan == loaded.plan


MESSY = """# top
autoshard 1; let a   = 3 # x
let bcd = [1, # one
  2]
# own

# and

mesh { # hi
}
tensor { "a.b": "colwise", a.cde: b(parts=3,
   # inside
  gather), # tail
  x { y: z; "0.w": "r" }
  h.* {

    # first
    a: b

    # last

  } # after scope
  use transformers.tp_plan
  drop "x.y"; optional  c:d, e =f
# end
}


zero {  } # last
# eof"""
NEAT = """# top
autoshard 1
let a   = 3       # x
let bcd = [1, 2]  # one
# own

# and

mesh {  # hi
}
tensor {
  a.b:   colwise
  a.cde: b(parts=3, gather)  # inside  # tail
  x { y: z, "0.w": r }
  h.* {
    # first
    a: b

    # last
  }  # after scope
  use transformers.tp_plan
  drop x.y
  optional c: d
  e = f
  # end
}

zero {}  # last
# eof
"""


def test_formatting_aligns_keeps_comments_and_drops_quotes_and_commas() -> None:
    assert format_text(Source("m", MESSY)) == NEAT
    assert format_text(Source("n", NEAT)) == NEAT
    assert parse(Source("n", NEAT)).file == parse(Source("m", MESSY)).file


def test_a_long_line_is_broken_into_items() -> None:
    items = ", ".join(f"module_number_{i}: colwise" for i in range(6))
    text = format_text(Source("l", f"autoshard 1\ntensor {{ {items} }}"))
    assert text.count("\n") == 9


def test_every_comment_survives() -> None:
    text = "autoshard 1 # a\n#b\nmesh { #c\n tp = 2 #d\n #e\n} #f\nzero { stage = 3 } #g\n#h"
    formatted = format_text(Source("c", text))
    assert [formatted.count(f"#{c}") + formatted.count(f"# {c}") for c in "abcdefgh"] == [1] * 8


def test_a_plan_with_syntax_errors_is_not_formatted() -> None:
    with pytest.raises(PlanError, match="AS002"):
        format_text(Source("b", "autoshard 1\nmesh { tp = }"))
