"""Lower each stage's forward graph to a joint graph of forward and backward.

What ATen operations run, and in which order gradients are added, is decided by torch's own
autograd, traced on fake tensors of local shapes (see ``ir.lower``). This pass says what to
differentiate; it does not decide what is kept or computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autoshard.compiler.pass_base import Numerics, Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.diagnostics import PassError
from autoshard.ir.graph_function import BOUNDARY, GRAD, LOSS, PARAM, TANGENT, GraphFunction, Port
from autoshard.ir.lower import Differentiation
from autoshard.ir.lower_blocks import Done, gradient_reaches, lower_once
from autoshard.ir.params import ParamTable
from autoshard.ir.program import Level, Program
from autoshard.ir.tidy import erase_dead


@register
@dataclass(frozen=True)
class LowerJoint(Pass):
    """Make forward and backward of each stage explicit in ATen.

        y = linear(x, w)  -->  y = mm(x, t(w));  dw = mm(t(dy), x);  dx = mm(dy, w)

    Inputs gain a gradient for each boundary output that has one, and the seed of the loss; outputs
    gain one gradient per trainable parameter and per boundary input that leads to one. The
    transposes of collectives appear as collectives. A parameter that the loss doesn't depend on
    gets no gradient, as in torch, and a remark.
    """

    name: ClassVar[str] = "lower-joint"
    group: ClassVar[str] = "joint"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"staged"})
    establishes: ClassVar[frozenset[str]] = frozenset({"joint"})
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def run(self, program: Program, ctx: PassContext) -> None:
        """Build ``stage.joint`` for every stage, the last one first."""
        if all(stage.joint is not None or stage.phases for stage in program.stages):
            return
        pulling = _boundaries_with_gradient(program)
        received: set[str] = set()  # boundary values whose gradient the later stage sends
        done: Done = {}  # each distinct stage and block once
        for stage in reversed(program.stages):
            task = _task(stage.forward, program, pulling, received)
            stage.joint = lower_once(stage.forward, task, done)
            _drop_unused_gradients(program, stage.index)
            received = set(stage.joint.named_results(TANGENT))
        program.level = Level.JOINT
        if program.training:
            _check_gradients(program, ctx)


def _task(
    forward: GraphFunction, program: Program, pulling: set[str], received: set[str]
) -> Differentiation:
    """Say what to differentiate in one stage."""
    if not program.training:
        return Differentiation()
    seeds = {port: Port(TANGENT, "loss") for port in forward.outputs if port.kind == LOSS}
    seeds |= {
        port: Port(TANGENT, port.name)
        for port in forward.outputs
        if port.kind == BOUNDARY and port.name in received
    }
    gradients = {
        port: Port(GRAD, port.name)
        for port in forward.inputs
        if port.kind == PARAM and _is_trained(program.params, port)
    }
    gradients |= {
        port: Port(TANGENT, port.name)
        for port in forward.inputs
        if port.kind == BOUNDARY and port.name in pulling
    }
    return Differentiation(seeds, gradients)


def _is_trained(params: ParamTable, port: Port) -> bool:
    entry = params[port.name]
    return entry.requires_grad and (entry.dtype.is_floating_point or entry.dtype.is_complex)


def _boundaries_with_gradient(program: Program) -> set[str]:
    """Return the boundary values that depend on trained parameters, integers left out.

    Autograd may still find that a value needs none; its gradient is then dropped where it is made.
    """
    found: set[str] = set()
    for stage in program.stages:
        forward = stage.forward
        pulled = gradient_reaches(
            forward,
            (
                port
                for port in forward.inputs
                if (port.kind == PARAM and _is_trained(program.params, port))
                or (port.kind == BOUNDARY and port.name in found)
            ),
        )
        results = forward.named_results(BOUNDARY).items()
        found |= {name for name, node in results if node in pulled}
    return found


def _drop_unused_gradients(program: Program, index: int) -> None:
    """Let the stage after ``index`` send only gradients that ``index`` reads."""
    if index + 1 >= len(program.stages):
        return
    read = program.stages[index].joint.named(TANGENT)
    later = program.stages[index + 1].joint
    pairs = zip(later.outputs, later.results, strict=True)
    kept = [(p, node) for p, node in pairs if p.kind != TANGENT or p.name in read]
    if len(kept) < len(later.outputs):
        later.set_outputs([node for _, node in kept], [port for port, _ in kept])
        erase_dead(later)


def _check_gradients(program: Program, ctx: PassContext) -> None:
    """Report trained parameters without gradient; refuse a loss that depends on none."""
    got = {name for stage in program.stages for name in stage.joint.named_results(GRAD)}
    trained = [entry for entry in program.params.trainable() if entry.homes]
    for entry in trained:
        if entry.fqn not in got:
            ctx.missed(entry.fqn, "no gradient: the loss does not depend on it")
    if not trained:
        raise PassError(
            "no parameter that the model uses is trained",
            help="set `requires_grad` on those that are; a model without any needs no plan",
        )
    if not got:
        raise PassError(
            "the loss depends on no trainable parameter",
            help="check that it is computed from the model's output without `detach` or `no_grad`",
        )
