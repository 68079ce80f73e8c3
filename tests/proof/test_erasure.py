"""Erased programs are the plain model's joint graph, and what is not is shown on both sides."""

from functools import cache

import pytest
import torch
from torch import nn

from autoshard.dsl.load import load
from autoshard.frontend import Compiled, compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.mesh import Mesh
from autoshard.ops import collectives
from autoshard.proof.static import static_rows
from autoshard.proof.terms import Terms
from autoshard.proof.verdict import Status
from autoshard.source import Source
from autoshard.testing.models import tiny_gpt, tiny_hf, token_batch, token_loss
from autoshard.testing.mutants import named
from autoshard.testing.plans import Layout, plan_text
from tests.bank.models import rows

aten = torch.ops.aten
WHOLE = Layout(dp=2, pp=2, tp=2, zero=3, microbatches=2)


def built(family: str, samples: int):
    if family == "tiny_gpt":
        return tiny_gpt(layers=2, batch=samples, length=8, dropout=0.1)
    return tiny_hf(family, layers=2, batch=samples, length=8)


@cache
def captured(family: str, samples: int) -> Program:
    return capture(*built(family, samples), mesh=Mesh(()), compare=False)


def compiled(family: str = "tiny_gpt", layout: Layout = WHOLE) -> Compiled:
    model, batch, loss = built(family, layout.samples)
    plan = load(Source("p.plan", plan_text(family, layout))).require()
    first = captured(family, layout.micro_batch_size)
    return compile_plan(model, plan, batch, loss, captured=first, check=False)


def erasure(made: Compiled):
    return static_rows(made.program, made.plain)[1]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("tiny_gpt", WHOLE),
        ("tiny_gpt", Layout(pp=2, microbatches=4, schedule="zb_h1")),
        ("gpt2", Layout(dp=2, micro_batch_size=1)),  # positions are broadcast to one sample
        ("bloom", Layout(tp=8, micro_batch_size=1)),  # one sample and one head merged in one dim
        ("llama", WHOLE),  # its fused RMSNorm is taken apart where a stage begins
    ],
    ids=lambda value: str(value),
)
def test_what_is_left_is_the_plain_model(family: str, layout: Layout) -> None:
    made = compiled(family, layout)
    types, row, order = static_rows(made.program, made.plain)
    assert types.status is order.status is Status.PROVED, "\n".join(types.findings)
    assert row.status is Status.PROVED, "\n".join(row.findings)
    assert "results are the plain model's joint graph" in row.summary


class Split(nn.Module):
    """Ends with an output that stays split: its mean loss is taken over parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


def mean_over_parts() -> Compiled:
    model, batch, loss = rows(Split())
    text = "autoshard 1\nmesh { tp = 2 }\nbatch { micro_batch_size = 4 }\ntensor { up: colwise }\n"
    return compile_plan(model, load(Source("p.plan", text)).require(), batch, loss)


def test_the_mean_of_a_split_output_is_that_of_the_whole() -> None:
    made = mean_over_parts()
    types, row, _ = static_rows(made.program, made.plain)
    assert types.status is Status.PROVED, "\n".join(types.findings)
    assert row.status is Status.PROVED, "\n".join(row.findings)


@pytest.mark.parametrize("phase", ["F", "I"])
def test_a_mean_that_counts_one_rank_s_part_is_seen(phase: str) -> None:
    made = mean_over_parts()
    nodes = made.program.stages[0].phases[phase].graph.nodes
    (scale,) = (n for n in nodes if n.target is aten.mul.Tensor and n.args[1] == 1 / 32)
    scale.update_arg(1, 1 / 16)
    assert erasure(made).status is Status.WRONG


class Head(nn.Module):
    """Ends in 13 logits, which two ranks pad to 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def gathered_head() -> Compiled:
    batch = token_batch(4, 6, vocab=13)
    rules = "head: vocab(pad=8, gather=on)"
    text = f"autoshard 1\nmesh {{ tp = 2 }}\nbatch {{ micro_batch_size = 4 }}\ntensor {{ {rules} }}"
    return compile_plan(Head(), load(Source("p.plan", text)).require(), batch, token_loss)


def test_padding_is_cut_off_and_filled_up_again() -> None:
    row = erasure(gathered_head())
    assert row.status is Status.PROVED, "\n".join(row.findings)


@pytest.mark.parametrize(
    ("phase", "op", "place"),
    [("F", aten.slice.Tensor, 3), ("I", aten.slice_backward.default, 4)],
)
def test_a_column_too_few_before_the_padding_is_seen(phase: str, op: object, place: int) -> None:
    made = gathered_head()
    (node,) = made.program.stages[0].phases[phase].graph.find_nodes(op="call_function", target=op)
    assert node.args[place] == 13
    node.update_arg(place, 12)
    assert erasure(made).status is Status.WRONG


def test_named_rewrites_are_told() -> None:
    summary = erasure(compiled()).summary
    assert "fused bias, dropout, add and LayerNorm" in summary
    assert "dropout by counter" in summary
    assert "cross entropy over a split vocabulary" in summary


@pytest.mark.parametrize("name", ["lose-fused-gradient", "drop-fused-branch"])
def test_a_fused_rms_norm_that_forgets_a_branch_is_seen(name: str) -> None:
    made = compiled("llama", Layout(dp=2))
    assert named(name).plant(made.program)
    assert erasure(made).status is Status.WRONG


def test_a_scaled_gradient_is_shown_on_both_sides_with_its_places() -> None:
    made = compiled("tiny_gpt", Layout(dp=2, zero=3))
    function = made.program.stages[0].phases["I"]
    node = next(
        n for n in function.graph.nodes if n.target is aten.native_layer_norm_backward.default
    )
    rewriter = Rewriter(function, "faulty-pass")
    (dx,) = (n for n in node.users if n.args[1] == 0)
    users = list(dx.users)
    with rewriter.after(dx):
        wrong = rewriter.call(aten.mul.Tensor, dx, 0.5, like=dx)
    for user in users:
        user.replace_input_with(dx, wrong)
    row = erasure(made)
    assert row.status is Status.WRONG
    text = row.findings[0]
    assert text.startswith("gradient of '") and "is not the plain model's" in text
    assert "compiled: times(item(" in text and "in stage 0, I, h.0.ln_1 (" in text
    assert "last changed by faulty-pass" in text
    assert "plain:    item(layer_norm_backward(" in text and "in plain model," in text


def test_a_bucket_that_stays_gathered_for_backward_is_known_there() -> None:
    layout = Layout(dp=2, zero=3)
    text = plan_text("tiny_gpt", layout).replace(
        "stage = 3", "stage = 3, reshard_after_forward = off"
    )
    plan = load(Source("p.plan", text)).require()
    model, batch, loss = built("tiny_gpt", layout.samples)
    made = compile_plan(model, plan, batch, loss, captured=captured("tiny_gpt", 2))
    assert [row.status for row in static_rows(made.program, made.plain)] == [Status.PROVED] * 3


def test_a_constant_that_is_computed_again_in_backward_is_still_one() -> None:
    """ALiBi slopes are the same for all samples; backward reads them cast and recomputed."""
    layout = Layout(dp=2)
    extra = "precision { params = bf16 }\nrecompute { transformer.h.*: full }"
    plan = load(Source("p.plan", plan_text("bloom", layout, extra))).require()
    model, batch, loss = built("bloom", layout.samples)
    made = compile_plan(model, plan, batch, loss, captured=captured("bloom", 2))
    assert [row.status for row in static_rows(made.program, made.plain)] == [Status.PROVED] * 3


def test_a_view_of_another_parameter_in_the_gathered_bucket_is_seen() -> None:
    made = compiled("tiny_gpt", Layout(dp=2, zero=3))
    for stage in made.program.stages:
        function = stage.phases["F"]
        views = [n for n in function.graph.nodes if n.target is collectives.view_at]
        alike = {(v.args[0], tuple(v.args[2])): v for v in views}
        a, b = next(
            (alike[v.args[0], tuple(v.args[2])], v) for v in views if v not in alike.values()
        )
        a.args, b.args = (a.args[0], b.args[1], a.args[2]), (b.args[0], a.args[1], b.args[2])
    assert erasure(made).status is Status.WRONG


def test_without_the_plain_graph_nothing_is_claimed() -> None:
    made = compiled("tiny_gpt", Layout(dp=2, zero=3))
    assert static_rows(made.program, None)[1].status is Status.UNPROVEN


class Twice(nn.Module):
    """Reads one layer in two ways and a second one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        """Add two uses of one layer."""
        return self.a(x) + self.a(x.relu())


def test_shared_and_idle_parameters_have_the_gradients_of_the_plain_model() -> None:
    plan = load(Source("p.plan", "autoshard 1\nmesh { dp = 2 }\nbatch { micro_batch_size = 2 }\n"))
    made = compile_plan(
        Twice(), plan.require(), {"x": torch.randn(2, 4)}, lambda y, batch: y.square().mean()
    )
    assert erasure(made).status is Status.PROVED, erasure(made).findings


class Scaled(nn.Module):
    """Scales columns by one vector; samples and columns are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x):
        """Scale the columns of x (B, 4, 4)."""
        return self.fc(x) * self.scale.unsqueeze(0)


def test_a_value_that_is_repeated_along_another_dim_is_seen() -> None:
    """A view is erased, but not what it means to the operator that broadcasts it."""
    plan = load(Source("p.plan", "autoshard 1\nmesh { dp = 2 }\nbatch { micro_batch_size = 2 }\n"))
    made = compile_plan(
        Scaled(), plan.require(), {"x": torch.randn(2, 4, 4)}, lambda y, batch: y.square().mean()
    )
    assert erasure(made).status is Status.PROVED, erasure(made).findings
    function = made.program.stages[0].phases["F"]
    (node,) = function.graph.find_nodes(op="call_function", target=aten.unsqueeze.default)
    Rewriter(function, "faulty-pass").set_args(node, node.args[0], 1)
    assert erasure(made).status is Status.WRONG


def test_sums_are_equal_however_they_are_nested() -> None:
    terms = Terms()
    a, b, c = (terms.make(name) for name in "abc")
    assert terms.add(terms.add(a, b), c) == terms.add(b, terms.add(c, a))
    assert terms.add(a, a) != terms.add(a)


def test_the_first_difference_is_the_deepest_one() -> None:
    terms = Terms()
    a, b = terms.make("a"), terms.make("b")
    left = terms.make("exp", (terms.add(a, terms.make("sin", (a,))),))
    right = terms.make("exp", (terms.add(a, terms.make("sin", (b,))),))
    assert terms.first_difference(left, right) == (a, b)


class Normed(nn.Module):
    """Ends with a norm without parameters, over one dim of three."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(self.up(x).view(-1, 2, 4), (4,)).flatten(1)


@pytest.mark.parametrize("phase", ["F", "I"])
def test_a_plain_norm_over_other_dims_is_seen(phase: str) -> None:
    model, batch, loss = rows(Normed())
    text = "autoshard 1\nmesh { dp = 2 }\nbatch { micro_batch_size = 4 }\n"
    made = compile_plan(model, load(Source("p.plan", text)).require(), batch, loss)
    assert erasure(made).status is Status.PROVED
    graph = made.program.stages[0].phases[phase].graph
    norms = (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)
    (norm,) = (n for n in graph.nodes if n.target in norms)
    place = norms.index(norm.target) + 1
    assert list(norm.args[place]) == [4]
    norm.update_arg(place, [2, 4])
    assert erasure(made).status is Status.WRONG
