"""The table of words agrees with everything that is made from it."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from autoshard.dsl import doc
from autoshard.dsl.codes import PAGES, page
from autoshard.dsl.editors import textmate
from autoshard.dsl.executable import not_executable
from autoshard.dsl.foreign import HF_STYLES
from autoshard.dsl.load import load
from autoshard.dsl.schema import BLOCK, SCHEMA, default_of
from autoshard.plan import BLOCKS, Plan
from autoshard.source import Source

ROOT = Path(__file__).resolve().parents[2]


def test_blocks_and_settings_are_those_of_the_dataclasses() -> None:
    assert tuple(BLOCK) == BLOCKS
    for spec in SCHEMA:
        if spec.name == "mesh":
            continue
        own = [field.name for field in fields(type(getattr(Plan(), spec.name)))]
        extra = ["rules"] * bool(spec.styles) + ["uses"] * (spec.name == "tensor")
        assert own == [setting.name for setting in spec.settings] + extra or set(own) == {
            *(setting.name for setting in spec.settings),
            *extra,
        }


def test_every_default_can_run_and_reads_back() -> None:
    assert not_executable(Plan()) == ()
    for spec in SCHEMA:
        for setting in spec.settings:
            default = default_of(spec.name, setting.name)
            if default in (None, ()):
                continue
            text = f"autoshard 1; {spec.name} {{ {setting.name} = {setting.kind.show(default)} }}"
            plan = load(Source("d", text)).require()
            assert getattr(getattr(plan, spec.name), setting.name) == default


def test_executable_values_are_values() -> None:
    for spec in SCHEMA:
        for setting in spec.settings:
            for value in setting.executable if isinstance(setting.executable, tuple) else ():
                text = f"autoshard 1; {spec.name} {{ {setting.name} = {value} }}"
                assert load(Source("e", text)).errors == (), value


def test_no_foreign_word_shadows_one_of_ours() -> None:
    for spec in SCHEMA:
        names = {setting.name for setting in spec.settings}
        assert not names & {word for s in spec.settings for word in s.synonyms}
        words = [word for s in spec.settings for word in s.synonyms]
        assert len(words) == len(set(words)), spec.name
    blocks = [word for spec in SCHEMA for word in spec.synonyms]
    assert len(blocks) == len(set(blocks))
    assert not set(blocks) & set(BLOCK)


def test_hugging_face_styles_lead_to_styles_and_options_of_ours() -> None:
    for style, options in HF_STYLES.values():
        spec = BLOCK["tensor"].style(style)
        assert all(spec.option(name) for name in options)


@pytest.mark.parametrize("name", ["plan-language.md", "error-codes.md"])
def test_the_generated_pages_are_current(name: str, tmp_path: Path) -> None:
    doc.write(tmp_path)
    hint = "run: python -m autoshard.dsl.doc docs"
    assert (ROOT / "docs" / name).read_text() == (tmp_path / name).read_text(), hint


def test_the_textmate_grammar_is_current_and_its_patterns_compile() -> None:
    assert textmate.FILE.read_text() == textmate.text(), "run: python -m ...editors.textmate"
    for pattern in textmate.grammar()["patterns"]:
        re.compile(pattern["match"])


def test_the_example_of_the_reference_is_a_right_plan() -> None:
    example = doc.INTRODUCTION.split("```")[1].strip()
    own = example.replace('include "base.plan"', "").replace("drop transformer.wte", "")
    assert load(Source("doc", own)).errors == ()


def used_codes() -> set[str]:
    """Return the codes that the sources mention."""
    folders = ("dsl", "autoshard", "passes")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    texts = (path.read_text() for path in files if not path.stem.startswith("codes"))
    return {code for text in texts for code in re.findall(r"\"(AS\d{3})\"", text)}


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    assert used_codes() == set(PAGES)
    assert list(PAGES) == sorted(PAGES)


@pytest.mark.parametrize("code", PAGES)
def test_the_right_example_of_a_page_is_right(code: str) -> None:
    """Examples are blocks, or items of the block that the code's hundreds stand for."""
    found = PAGES[code]
    assert page(code).startswith(f"{code}: {found.title}")
    assert all(len(line) <= 100 for line in page(code).splitlines())
    elsewhere = ("--set", "Plan(", "autoshard", "include")
    if not found.right or code >= "AS700" or found.right.startswith(elsewhere):
        return  # a model's code, or a command
    assert load(Source(code, f"autoshard 1\n{_in_block(found.right)}\n")).errors == ()
    if found.wrong and code < "AS200" and code not in ("AS110", "AS112"):  # need a plan around
        assert load(Source(code, f"autoshard 1\n{_in_block(found.wrong)}\n")).diagnostics


def _in_block(text: str) -> str:
    """Put items into the block they belong to; variables get a value."""
    lets = "let layers = h.*\n" if "$layers" in text else ""
    if re.match(r"\w+ \{|let |mesh", text):
        return lets + text
    for name, block in (("schedule", "pipeline"), ("split", "pipeline"), ("reduce_", "zero")):
        if text.startswith(name):
            return f"{lets}{block} {{ {text}\n}}"
    block = "recompute" if ": full" in text else "tensor"
    style = text if ":" in text or "=" in text.split("(")[0] or "->" in text else f"x: {text}"
    return f"{block} {{ {style}\n}}"


def test_pygments_colours_a_plan_without_errors() -> None:
    pytest.importorskip("pygments")
    from pygments.token import Error, Token

    from autoshard.dsl.editors.pygments_lexer import PlanLexer

    for path in (ROOT / "examples/plans").glob("*.plan"):
        tokens = list(PlanLexer().get_tokens(path.read_text()))
        assert Error not in {kind for kind, _ in tokens}
        assert "".join(text for _, text in tokens) == path.read_text()
        kinds = {text: kind for kind, text in tokens}
        assert kinds["autoshard"] in Token.Keyword and kinds["mesh"] in Token.Name.Class
