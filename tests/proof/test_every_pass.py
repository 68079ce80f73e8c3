"""A fault in any pass is seen, and the message names pass, node, source line and plan line."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.fx import Node

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.diagnostics import VerifyError
from autoshard.dsl.load import load
from autoshard.frontend import Compiled, compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.node_info import info, val
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.mesh import Mesh
from autoshard.ops import collectives
from autoshard.passes.pipelines import default_pipeline
from autoshard.plan import Plan
from autoshard.proof.plain import PlainSide
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Row, Status
from autoshard.source import Source
from autoshard.testing.faults import after
from autoshard.testing.models import tiny_gpt
from autoshard.testing.plans import Layout, plan_text
from autoshard.verify import verify

LAYOUT = Layout(dp=2, pp=2, tp=2, zero=3, microbatches=2)
EXTRA = "precision { compute = bf16 }\nrecompute { h.*: full }\n"
PASSES = {step.name: step for step in default_pipeline().passes}
BEFORE_ERASURE = ("canonicalize", "globalize-loss")  # the plain side is taken after them
MODULE = "mlp.up"
LINE = "models.py:52: return F.dropout(self.down(F.gelu(self.up(x)))"
PLAN_TEXT = plan_text("tiny_gpt", LAYOUT, EXTRA)


def plan(text: str = PLAN_TEXT) -> Plan:
    return load(Source("p.plan", text)).require()


@cache
def captured() -> Program:
    one = tiny_gpt(layers=2, batch=LAYOUT.micro_batch_size, length=8)
    return capture(*one, mesh=Mesh(()), compare=False)


def place(node: Node) -> bool:
    """Tell whether a node is a value that the split linear computes or reads."""
    return (
        node.op == "call_function"
        and info(node).path.endswith(MODULE)
        and (node.target is collectives.wait or str(node.target).startswith("aten."))
        and isinstance(node.meta.get("val"), torch.Tensor)
        and val(node).is_floating_point()
        and bool(info(node).source and node.users)
    )


def halve(program: Program, name: str) -> None:
    """Halve one value, as a bug in the pass of that name would: a node of its own if it has one."""
    found = [(f, n) for _, f in program.functions() for n in f.graph.nodes if place(n)]
    spanned = [(f, n) for f, n in found if info(n).span is not None] or found
    own = [(f, n) for f, n in spanned if info(n).passes[-1:] == (name,)]
    function, node = (own or spanned)[0]
    after(Rewriter(function, name), node, torch.ops.aten.mul.Tensor, 0.5)


def broken(step: Pass) -> Callable[[Pass, Program, PassContext], None]:
    """Return ``run`` of a pass that does its work and then a wrong thing."""
    real = type(step).run

    def run(self: Pass, program: Program, ctx: PassContext) -> None:
        real(self, program, ctx)
        halve(program, self.name)

    return run


def compiled() -> Compiled:
    model, batch, loss = tiny_gpt(layers=2, batch=LAYOUT.samples, length=8)
    return compile_plan(model, plan(), batch, loss, captured=captured(), check=False)


@cache
def plain_side() -> PlainSide:
    sound = compiled()
    return PlainSide.read(sound.plain, sound.program)


def rows() -> tuple[Row, ...]:
    return static_rows(compiled().program, plain_side())


def test_without_a_fault_every_row_is_proved() -> None:
    assert {row.status for row in rows()} == {Status.PROVED}


@pytest.mark.parametrize("name", [n for n in PASSES if n not in BEFORE_ERASURE])
def test_a_fault_in_a_pass_is_seen_and_placed(name: str, monkeypatch) -> None:
    plain_side()  # of the sound pipeline
    monkeypatch.setattr(type(PASSES[name]), "run", broken(PASSES[name]))
    wrong = [text for row in rows() if row.status is Status.WRONG for text in row.findings]
    assert wrong, f"no link sees a fault in {name}"
    ours = wrong[0].rpartition("compiled: ")[2]
    assert "0.5" in ours and MODULE in ours and LINE in ours, wrong[0]
    assert name in ours.rpartition("last changed by ")[2], wrong[0]
    line = int(ours.rpartition("plan line ")[2].split(",")[0])
    said = PLAN_TEXT.splitlines()[line - 1]
    assert MODULE in said or said.startswith(("precision", "recompute")), said


@pytest.mark.parametrize("name", BEFORE_ERASURE)
def test_a_fault_before_the_plain_side_is_taken_is_seen_by_numbers(name: str, monkeypatch) -> None:
    small = replace(LAYOUT, pp=1, zero=0)
    monkeypatch.setattr(type(PASSES[name]), "run", broken(PASSES[name]))
    model, batch, loss = tiny_gpt(layers=1, batch=small.samples, length=8)
    verdict = verify(model, plan(plan_text("tiny_gpt", small)), batch, loss, steps=1)
    assert verdict.row("erasure").status is Status.PROVED  # docs/proof.md says so
    assert verdict.row("numbers").status is Status.WRONG
    assert verdict.row("numbers").findings[0].startswith("first difference: loss, step 0")


def test_a_wrong_home_is_told_with_the_lines_of_its_module() -> None:
    made = compiled()
    made.program.params.update("h.0.mlp.up.weight", homes=(1,))
    types = static_rows(made.program, plain_side())[0]
    assert types.status is Status.WRONG
    (text,) = (t for t in types.findings if "`h.0.mlp.up.weight` is used by stages [1]" in t)
    assert MODULE in text and LINE in text and "plan line 6" in text


@pytest.mark.parametrize(
    "op", [collectives.all_gather, collectives.pack, collectives.reduce_scatter]
)
def test_a_fault_on_which_a_later_pass_stops_names_the_pass_that_planted_it(
    op: object, monkeypatch
) -> None:
    storage = type(PASSES["shard-storage"])
    real = storage.run

    def run(self: Pass, program: Program, ctx: PassContext) -> None:
        real(self, program, ctx)
        for _, function in program.functions():
            for node in function.graph.find_nodes(op="call_function", target=op):
                after(Rewriter(function, self.name), node, torch.ops.aten.mul.Tensor, 0.5)

    monkeypatch.setattr(storage, "run", run)
    with pytest.raises(VerifyError, match="last changed by shard-storage") as raised:
        compiled()  # invariants are not checked between passes here
    assert "in pass 'bucket-collectives" in str(raised.value)
