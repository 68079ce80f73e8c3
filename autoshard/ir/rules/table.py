"""The rule table: one rule per operator, joined from the families, and how to ask it."""

from __future__ import annotations

from autoshard.ir.placement import Placement
from autoshard.ir.rules import (
    attention,
    backward,
    communication,
    contractions,
    convolution,
    experts,
    factories,
    indexing,
    losses,
    norms,
    pointwise,
    reductions,
    scatters,
    transforms,
    views,
)
from autoshard.ir.rules.call import Call, Choice, Rule, replicate

FAMILIES = (
    pointwise,
    views,
    transforms,
    contractions,
    reductions,
    norms,
    attention,
    indexing,
    scatters,
    losses,
    factories,
    convolution,
    experts,
    communication,
    backward,
)
# By operator, or by name where an operator exists only once somebody else's module is imported.
RULES: dict[object, Rule] = {op: rule for family in FAMILIES for op, rule in family.TABLE.items()}


def choose(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Return what the operator's rule decides; without a rule everything is gathered, unproven."""
    rule = RULES.get(call.op) or RULES.get(str(call.op))
    if rule is None:
        return replicate(call, proven=False)
    return rule(call, ins)
