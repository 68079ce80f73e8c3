"""How the wrong plans are checked: which model, how many processes, and the expected text."""

from functools import cache
from pathlib import Path

from autoshard.cli.plan_check import check
from autoshard.diagnostics import render
from autoshard.model_facts import ModelFacts
from autoshard.source import Source
from tests.dsl import models

WRONG = Path(__file__).parent / "wrong"

# Plan -> (model, processes); those without a model need none to be found wrong.
CASES: dict[str, tuple[str | None, int | None]] = {
    "01-no-version": (None, None),
    "02-unclosed": ("gpt2", 2),
    "03-syntax": ("gpt2", 2),
    "04-unknown-setting": ("gpt2", 8),
    "05-unknown-block": ("gpt2", 2),
    "06-typo-glob": ("gpt2", 2),
    "07-renamed-module": ("vit", 2),
    "08-unknown-style": ("gpt2", 2),
    "09-overlap": ("gpt2", 2),
    "10-mesh-world": ("bloom", 384),
    "11-kv-heads": ("llama3", 16),
    "12-vocab-and-tied": ("gpt2", 2),
    "13-fused-qkv": ("gpt2", 2),
    "14-batch-and-bubble": ("bloom", 384),
    "15-units-and-precision": ("gpt2", 4),
}


@cache
def facts_of(name: str) -> ModelFacts:
    """Return the facts of one of the models, built once."""
    from autoshard.ir.facts import describe

    return describe(getattr(models, name)()[0])


def messages(name: str) -> str:
    """Return what `plan check` prints for one of the wrong plans."""
    model, world = CASES[name]
    source = Source(f"{name}.plan", (WRONG / f"{name}.plan").read_text())
    result = check(source, (), facts_of(model) if model else None, world)
    return "".join(render(diagnostic) + "\n\n" for diagnostic in result.diagnostics)
