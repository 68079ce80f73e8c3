"""What the tests of the case bank share: train by a plan in lock step beside plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from autoshard.diagnostics import AutoshardError
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.plan import Plan
from autoshard.source import Source
from autoshard.testing.equivalence import TOLERANCE, Comparison, compare_plan, differences
from autoshard.testing.lockstep import StepRecord, adamw
from autoshard.testing.models import Built, tiny_gpt

MAX_NORM = 1.0


def toy(batch: int = 4, **options: object) -> Built:
    """Return the bank's Toy: 4 blocks, width 32, 4 heads, vocabulary 96, sequence 16."""
    return tiny_gpt(**{"layers": 4, "width": 32, "heads": 4, "batch": batch, **options})


def read(text: str) -> Plan:
    """Return the plan that a text spells without its first line."""
    return load(Source("case.plan", f"autoshard 1\n{text.strip()}\n")).require()


def compare(built: Built, plan: str, **options: object) -> Comparison:
    """Train the captured model and the plan's program on the global batch; see compare_plan."""
    model, batch, loss = built
    return compare_plan(model, read(plan), batch, loss, max_norm=MAX_NORM, **options)


def assert_equal(
    built: Built, plan: str, *, plain: bool | None = None, **options: object
) -> Comparison:
    """Check loss, gradients, norm and parameters of every step against the captured model.

    With ``plain`` against the plain model in float64 too. Hugging Face models, which bring their
    own loss, cast to float32 inside and would differ from themselves there.
    """
    found = compare(built, plan, **options)
    wrong = found.first_wrong()
    assert wrong is None, f"{wrong} (worst: {found.worst})"
    if plain if plain is not None else built[2] is not None:
        trained = train_plain(*built, steps=len(found.ours))
        worst = max(differences(found.ours, trained), key=lambda d: d.error)
        assert worst.error <= TOLERANCE, f"{worst} against the plain model"
    return found


def finding(built: Built, plan: str, fault: Callable[[Program], bool]) -> str:
    """Return what is seen first of a planted fault: what differs, or why lock step stopped."""
    planted = []
    try:
        found = compare(built, plan, steps=1, mutate=lambda program: planted.append(fault(program)))
    except AutoshardError as error:
        found = error
    assert planted == [True], "the fault found no place to break"
    if isinstance(found, AutoshardError):
        return str(found)
    wrong = found.first_wrong()
    assert wrong is not None, "the fault was not seen"
    return wrong.what


def refusal(built: Built, plan: str) -> str:
    """Return what the user sees; nothing has been launched or trained then."""
    model, batch, loss = built
    with pytest.raises(AutoshardError) as caught:
        compile_plan(model, read(plan), batch, loss, executable=True)
    assert caught.value.exit_code == 1
    return str(caught.value)


def train_plain(
    model: nn.Module,
    batch: dict[str, Tensor],
    loss: Callable[..., Tensor] | None,
    steps: int,
    max_norm: float = MAX_NORM,
) -> tuple[StepRecord, ...]:
    """Train a copy of the plain model in float64 on the whole batch, in one process."""
    model = copy.deepcopy(model).double()
    batch = {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
    optimizer = adamw(model.parameters())
    records = []
    for _ in range(steps):
        value = plain_loss(model, batch, loss)
        value.backward()
        named = dict(model.named_parameters())
        grads = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        params = {n: p.detach().clone() for n, p in named.items() if n in grads}
        records.append(StepRecord(value.detach(), grads, norm, params))
    return tuple(records)


def plain_loss(
    model: nn.Module, batch: dict[str, Tensor], loss: Callable[..., Tensor] | None
) -> Tensor:
    """Return the loss as its author would compute it."""
    if loss is None:
        return model(**batch).loss
    known = model.forward.__code__.co_varnames
    return loss(model(**{n: v for n, v in batch.items() if n in known}), batch)


def tamper(
    program: Program, stage: int, phase: str, wanted: Callable[[Node], bool], op: object, *args
) -> bool:
    """Put ``op(node, *args)`` behind the first wanted node of a graph, for all its users."""
    function = program.stages[stage].phases[phase]
    for node in function.graph.nodes:
        if not wanted(node) or not node.users:
            continue
        users, rewriter = list(node.users), Rewriter(function, "fault")
        with rewriter.after(node):
            changed = rewriter.call(op, node, *args, like=node)
        for user in users:
            user.replace_input_with(node, changed)
        return True
    return False


def is_call(*targets: object) -> Callable[[Node], bool]:
    """Return a predicate of calls of ``targets``."""
    return lambda node: node.op == "call_function" and node.target in targets


def double(program: Program, stage: int, phase: str, wanted: Callable[[Node], bool]) -> bool:
    """Plant a factor of two behind the first wanted node."""
    return tamper(program, stage, phase, wanted, torch.ops.aten.mul.Tensor, 2.0)
