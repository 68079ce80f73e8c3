"""Equal graphs are worked on once: what is stamped out is what would have been made."""

from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.lower import lower
from autoshard.ir.node_info import info
from autoshard.ir.stamp import outline
from autoshard.passes import lower_joint
from autoshard.source import Source
from autoshard.testing.models import tiny_gpt
from autoshard.testing.plans import Layout, plan_text


def compiled(layers=4, pp=4, tp=2, dropout=0.1):
    model, batch, loss = tiny_gpt(layers=layers, batch=2, length=8, dropout=dropout)
    layout = Layout(pp=pp, tp=tp, microbatches=1)
    plan = load(Source("plan", plan_text("tiny_gpt", layout))).require()
    return compile_plan(model, plan, batch, loss, until="joint").program


def lines(function):
    """Return a graph as text with the record of every node."""
    text = [str(function.inputs), str(function.outputs), str(function.graph)]
    return [*text, *(f"{n.name} {info(n)} {tuple(n.args)}" for n in function.graph.nodes)]


def test_stamped_stages_are_what_lowering_each_stage_gives(monkeypatch):
    lowered = []
    monkeypatch.setattr(lower_joint, "lower", lambda *given: lowered.append(1) or lower(*given))
    stamped = compiled()
    assert len(lowered) == 3 < len(stamped.stages)  # those in the middle are equal
    monkeypatch.setattr(lower_joint, "outline", lambda *given: outline(given[0], object()))
    each = compiled()
    for ours, theirs in zip(stamped.stages, each.stages, strict=True):
        assert lines(ours.joint) == lines(theirs.joint)
