"""Equal graphs are worked on once: what is stamped out is what would have been made."""

import pytest
import torch
from torch import nn

from autoshard.compiler.pass_base import PassContext
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir import lower_blocks
from autoshard.ir.lower import lower
from autoshard.ir.node_info import info
from autoshard.ir.stamp import outline
from autoshard.passes.lower_joint import LowerJoint
from autoshard.source import Source
from autoshard.testing.models import tiny_gpt, tiny_hf
from autoshard.testing.plans import Layout, plan_text

CASES = {
    "tiny_gpt": Layout(pp=4, tp=2, microbatches=2),
    "gpt2": Layout(tp=4, sequence=True),
    "llama": Layout(pp=2, tp=2, microbatches=2),
    "bloom": Layout(dp=2, zero=3),
}


# Embedding, block and head; a block that begins or ends a stage is another one.
MOST = {"tiny_gpt": 4, "gpt2": 4, "llama": 7, "bloom": 4}


def cut(name, layout, change=lambda model: None):
    """Return a model of 4 layers cut in stages, and the context for passes on it."""
    make = tiny_gpt if name == "tiny_gpt" else lambda **sizes: tiny_hf(name, **sizes)
    model, batch, loss = make(layers=4, batch=2, length=8, dropout=0.1)
    change(model)
    plan = load(Source("plan", plan_text(name, layout))).require()
    compiled = compile_plan(model, plan, batch, loss, until="cut-stages", check=False)
    return compiled.program, PassContext(compiled.resolved)


def lowered(program, context, monkeypatch):
    """Return the joint graphs of a copy of ``program`` and how many graphs autograd ran on."""
    count = []
    with monkeypatch.context() as patch:
        patch.setattr(lower_blocks, "lower", lambda *args: count.append(1) or lower(*args))
        copy = program.fork()
        LowerJoint().run(copy, context)
    return [stage.joint for stage in copy.stages], len(count)


@pytest.mark.parametrize("name", CASES)
def test_stamped_joint_graphs_are_what_lowering_each_stage_gives(name, monkeypatch):
    program, context = cut(name, CASES[name])
    stamped, count = lowered(program, context, monkeypatch)
    assert count <= MOST[name]
    monkeypatch.setattr(lower_blocks, "_by_blocks", lambda *given: None)
    monkeypatch.setattr(lower_blocks, "outline", lambda *given: outline(given[0], object()))
    each, count = lowered(program, context, monkeypatch)
    assert count == len(program.stages)
    for ours, theirs in zip(stamped, each, strict=True):
        assert outline(ours) == outline(theirs)


def test_a_layer_that_differs_is_not_stamped(monkeypatch):
    def change(model):
        model.h[2].ln_1.eps = 1e-2

    (joint,), count = lowered(*cut("tiny_gpt", Layout(), change), monkeypatch)
    assert count == MOST["gpt2"] + 1
    assert [info(n).path for n in joint.graph.nodes if 1e-2 in n.args] == ["h.2.ln_1"]


class OneNorm(nn.Module):
    """A residual block with one norm, so that its sum is fused into the next block's norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.fc(self.norm(x))


def test_gradients_of_a_boundary_that_two_blocks_read_are_added():
    model = nn.Sequential(*(OneNorm() for _ in range(6)))
    text = "autoshard 1\nmesh { pp = 2 }\nbatch { micro_batch_size = 2, num_microbatches = 2 }\n"
    text += 'pipeline { split = even("*") }\n'
    plan = load(Source("plan", text)).require()
    batch = {"input": torch.randn(2, 8)}
    compiled = compile_plan(model, plan, batch, lambda y, _: (y * y).mean(), until="lower-joint")
    joint = compiled.program.stages[1].joint
    (gradient,) = joint.named_results("tangent").values()
    (boundary,) = joint.named("boundary").values()
    assert len(boundary.users) > 2  # the norms of two blocks, or one of them and its backward
    assert gradient.target is torch.ops.aten.add.Tensor
