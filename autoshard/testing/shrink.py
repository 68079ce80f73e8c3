"""Make a drawn plan that fails smaller, as long as it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from autoshard.testing.random_plans import Drawn

_LIST = re.compile(r"(\{ )(.*)( \})", re.DOTALL)


def shrink(drawn: Drawn, fails: Callable[[Drawn], bool], most: int = 40) -> Drawn:
    """Return the smallest plan found in ``most`` trials of which ``fails`` is still true."""
    trials = 0
    candidates = smaller(drawn)
    while trials < most:
        candidate = next(candidates, None)
        if candidate is None:
            break
        trials += 1
        if fails(candidate):
            drawn, candidates = candidate, smaller(candidate)
    return drawn


def smaller(drawn: Drawn) -> Iterator[Drawn]:
    """Yield what is one step smaller: a simpler model, a block or a setting less."""
    first, *blocks = re.split(r"\n(?=[a-z]+ \{)", drawn.plan.rstrip("\n"))
    for place in reversed(range(len(blocks))):
        yield _with(drawn, [first, *blocks[:place], *blocks[place + 1 :]])
    simpler = {"layers": max(drawn.layers - 1, 1), "dropout": 0.0, "heads": 4, "vocab": 96}
    for name, value in simpler.items():
        if value != getattr(drawn, name):
            yield replace(drawn, **{name: value})
    for place, block in enumerate(blocks):
        for less in _less(block):
            yield _with(drawn, [first, *blocks[:place], less, *blocks[place + 1 :]])


def _less(block: str) -> Iterator[str]:
    """Yield a block without one of its settings; rules are kept as they are."""
    match = _LIST.search(block)
    items = match[2].split(", ") if match else []
    for place in range(len(items)) if ":" not in block else ():
        kept = ", ".join(items[:place] + items[place + 1 :])
        yield block[: match.start()] + match[1] + kept + match[3] + block[match.end() :]


def _with(drawn: Drawn, lines: list[str]) -> Drawn:
    return replace(drawn, plan="\n".join(lines) + "\n")
