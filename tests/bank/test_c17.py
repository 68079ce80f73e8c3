"""C17: cross entropy over a split head: smoothed, gathered, and never left as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.diagnostics import AutoshardError
from autoshard.frontend import compile_plan
from autoshard.ir.invariants import CHECKERS
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.vocab import vocab_cross_entropy
from autoshard.testing.models import Built, tiny_gpt
from tests.bank.equal import assert_equal, finding, read, tamper

aten = torch.ops.aten
PLAN = """
mesh {{ dp = 2, tp = 2 }}
batch {{ micro_batch_size = 2 }}
tensor {{ wte: vocab(pad=4), head: {head} }}
"""
SPLIT, GATHERED = PLAN.format(head="vocab(pad=4)"), PLAN.format(head="vocab(pad=4, gather)")


def smoothed(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return a smoothed loss with terms of its own: entropies and a z-loss."""
    rows = output.flatten(0, 1)
    loss = F.cross_entropy(rows, batch["labels"].flatten(), label_smoothing=0.1)
    return loss + 1e-2 * rows.logsumexp(-1).square().mean()


def odd(loss=smoothed) -> Built:
    """Return a model of 97 words, which two ranks hold as 104."""
    model, batch, _ = tiny_gpt(layers=1, heads=4, vocab=97, length=8)
    return model, batch, loss


@pytest.mark.parametrize("plan", [SPLIT, GATHERED], ids=["split", "gathered"])
def test_a_smoothed_loss_trains_as_one_process_does(plan: str) -> None:
    assert_equal(odd(), plan, steps=1)


def leave_cross_entropy_whole(program: Program) -> None:
    """Plant the fault: let each rank take the cross entropy of its own columns."""
    rewriter = Rewriter(program.forward, "fault")
    for node in program.forward.graph.find_nodes(op="call_function", target=vocab_cross_entropy):
        logits, target = node.args[:2]
        loss = next(user for user in node.users if user.args[1] == 0)
        with rewriter.before(node):
            local = rewriter.call(
                aten.cross_entropy_loss.default, logits, target, None, 0, like=loss
            )
        rewriter.replace(loss, local)
    rewriter.sweep()


def test_plain_cross_entropy_of_split_logits_is_refused() -> None:
    model, batch, loss = odd()
    program = compile_plan(model, read(SPLIT), batch, loss, until="localize-shapes").program
    CHECKERS["placed"](program)
    leave_cross_entropy_whole(program)
    with pytest.raises(AutoshardError, match=r"cross_entropy_loss.*vocab cross entropy could"):
        CHECKERS["placed"](program)


def test_a_loss_that_is_wrong_by_a_logarithm_would_be_seen() -> None:
    """Plant the fault of the field: a loss with log(tp) in excess."""
    assert finding(odd(), SPLIT, _excess) == "loss"


def _excess(program: Program) -> bool:
    function = program.stages[-1].phases["F"]
    (node,) = function.graph.find_nodes(op="call_function", target=vocab_cross_entropy)
    loss = next(user for user in node.users if user.args[1] == 0)
    return tamper(program, -1, "F", lambda n: n is loss, aten.add.Tensor, 0.69)
