"""Sequence parallelism: between split layers ranks hold 1/tp of the tokens, and stay right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.compiler.pass_base import PassContext
from autoshard.diagnostics import PlacementError
from autoshard.dsl.load import load
from autoshard.frontend import Compiled, compile_plan
from autoshard.ops import collectives
from autoshard.passes.insert_collectives import InsertCollectives
from autoshard.source import Source
from autoshard.testing.equivalence import TOLERANCE, compare_plan
from autoshard.testing.models import Built, tiny_gpt, tiny_hf
from tests.passes.plans import RULES

MIXER = {"*.up": "colwise", "*.down": "rowwise"}
WIDTH = 16


def plan_of(rules: dict[str, str], tp: int = 2, samples: int = 2):
    """Return a plan of tensor rules with sequence parallelism; the globs are those of Python."""
    lines = "\n".join(f"  {_glob(path)}: {style}" for path, style in rules.items())
    text = f"""autoshard 1
mesh {{ tp = {tp} }}
batch {{ micro_batch_size = {samples} }}
tensor {{
  sequence_parallel = on
{lines}
}}
"""
    return load(Source("sequence.plan", text)).require()


def _glob(path: str) -> str:
    path = path.replace("[qkv]_proj", "{q,k,v}_proj").replace("[qkv]", "{q,k,v}")
    return path.replace("*.", "**.", 1) if path.startswith("*.") else path.replace("?", "*")


def compiled(built: Built, rules: dict[str, str], tp: int = 2) -> Compiled:
    model, batch, loss = built
    return compile_plan(model, plan_of(rules, tp), batch, loss, until="localize-shapes")


def count(compiled: Compiled, op: object) -> int:
    return len(compiled.program.forward.graph.find_nodes(op="call_function", target=op))


def assert_equal(built: Built, rules: dict[str, str], tp: int = 2) -> None:
    """Check loss, gradients, norm and parameters of a step against one process."""
    model, batch, loss = built
    found = compare_plan(model, plan_of(rules, tp), batch, loss, steps=1)
    wrong = found.first_wrong(TOLERANCE)
    assert wrong is None, f"{wrong} (worst: {found.worst})"


TIED = {
    "bert": {},  # its embedding and its head, with a bias of two names, stay whole
    "t5": {"encoder.embed_tokens": "vocab", "decoder.embed_tokens": "vocab"},
}


@pytest.mark.parametrize("name", TIED)
def test_other_shapes_of_transformers_train_on_token_shards(name: str) -> None:
    """BERT norms after the sum; T5's decoder reads the encoder's tokens in every layer."""
    rules = {**TIED[name], **RULES[name]}
    if name == "bert":
        rules = {path: style for path, style in rules.items() if style != "vocab"}
    assert_equal(tiny_hf(name, batch=2, length=8), rules)


def test_tokens_are_split_where_every_parameter_is_whole() -> None:
    assert_equal(tiny_gpt(layers=1, batch=2, length=8), {})


class Mixer(nn.Module):
    """Residual MLP blocks on patches of a signal, with something between them."""

    def __init__(self, between: nn.Module | None = None, class_token: bool = False) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.first, self.second = _Mlp(), _Mlp()
        self.between = between or nn.Identity()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH)) if class_token else None
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores of x (B, N, 4)."""
        x = self.patch(x)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = self.norm(self.second(self.between(self.first(x))))
        return self.head(x[:, 0] if self.token is not None else x.mean(1))


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Cumulate(nn.Module):
    """Mixes tokens outside attention: each sees the sum of those before it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the running sums of x (B, N, C) over its tokens, made smaller."""
        return x.cumsum(1) / x.shape[1]


class Reverse(nn.Module):
    """Takes tokens apart in another way than ranks do."""

    def forward(self, x: Tensor) -> Tensor:
        """Swap the first quarter of the tokens of x (B, N, C) with the rest."""
        quarter = x.shape[1] // 4
        return torch.cat([x[:, quarter:], x[:, :quarter]], 1)


def mixer(between: nn.Module | None = None, *, tokens: int = 16, class_token: bool = False):
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, tokens, 4), "y": torch.tensor([1, 3])}
    return (
        Mixer(between, class_token),
        batch,
        lambda out, given: F.cross_entropy(out, given["y"]),
    )


@pytest.mark.parametrize("between", [None, Cumulate(), Reverse()], ids=str)
def test_what_mixes_tokens_outside_attention_gathers_them(between: nn.Module | None) -> None:
    assert_equal(mixer(between), MIXER)


def test_a_gather_that_no_split_layer_asked_for_is_remarked() -> None:
    said = [str(remark) for remark in compiled(mixer(Reverse()), MIXER).remarks]
    assert any("missed" in text and "gathers [2, 16, 16] S(1)" in text for text in said)


def test_tokens_that_do_not_divide_are_refused_with_the_lengths_that_would() -> None:
    with pytest.raises(PlacementError) as caught:
        compiled(mixer(class_token=True), MIXER)
    message = str(caught.value)
    assert caught.value.code == "AS407" and "sequence.plan:5" in message
    assert "17 tokens can't be split over tp = 2" in message and "16 or 18 tokens" in message


def test_a_class_token_that_completes_the_tokens_is_split_too() -> None:
    assert_equal(mixer(tokens=15, class_token=True), MIXER)


def test_rows_without_tokens_are_reduced_as_ever() -> None:
    rows = {"x": torch.randn(2, WIDTH), "y": torch.tensor([1, 3])}
    model = nn.Sequential(_Mlp(), nn.Linear(WIDTH, 5))
    built = (model, (rows["x"],), lambda out, given: out.square().mean())
    found = compiled(built, {'"0.up"': "colwise", '"0.down"': "rowwise"})
    assert count(found, collectives.all_reduce) == 1
    assert count(found, collectives.reduce_scatter) == 0


def test_an_unsplit_attention_is_read_whole_between_token_shards() -> None:
    built = tiny_gpt(batch=2, length=8)
    assert_equal(built, {"h.*.mlp.up": "colwise", "h.*.mlp.down": "rowwise"})


def test_a_second_run_changes_nothing() -> None:
    model, batch, loss = tiny_gpt(batch=2, length=8)
    plan = plan_of(RULES["gpt"])
    found = compile_plan(model, plan, batch, loss, until="insert-collectives")
    before = str(found.program.forward.graph)
    InsertCollectives().run(found.program, PassContext(found.resolved))
    assert str(found.program.forward.graph) == before


def test_a_lost_scatter_of_gradients_is_seen() -> None:
    """Plant the fault these tests are there for: gather without summing what comes back."""

    def forget(program) -> None:
        graph = program.stages[0].phases["I"].graph
        start = graph.find_nodes(op="call_function", target=collectives.reduce_scatter_start)[0]
        (wait,) = start.users
        wait.target, wait.args = collectives.shard, start.args
        graph.erase_node(start)

    model, batch, loss = tiny_gpt(batch=2, length=8)
    found = compare_plan(model, plan_of(RULES["gpt"]), batch, loss, steps=1, mutate=forget)
    assert found.first_wrong() is not None


class Latent(nn.Module):
    """Attention whose keys are written in two parts, one of them of all heads: DeepSeek's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.up = nn.Linear(WIDTH, 4 * 6), nn.Linear(8, 4 * 8)
        self.down, self.o = nn.Linear(WIDTH, 8 + 2), nn.Linear(4 * 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over x (B, T, D)."""
        y = self.norm(x)
        compressed, turned = self.down(y).split([8, 2], -1)
        k, v = self.up(compressed).unflatten(2, (4, 8)).transpose(1, 2).split([4, 4], -1)
        keys = k.new_empty(*k.shape[:3], 6)
        keys[..., :4].copy_(k)
        keys[..., 4:].copy_(turned[:, None])
        q = self.q(y).unflatten(2, (4, 6)).transpose(1, 2)
        z = F.scaled_dot_product_attention(q, keys, v, is_causal=True)
        return x + self.o(z.transpose(1, 2).flatten(2))


class Windows(nn.Module):
    """Swin's: tokens are rolled and taken apart into windows between split layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.o, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the windows of x (B, 16, D), an image of 4 by 4 tokens."""
        image = self.norm(x).view(-1, 4, 4, WIDTH).roll((-1, -1), (1, 2))
        windows = image.view(-1, 2, 2, 2, 2, WIDTH).transpose(2, 3).reshape(-1, 4, WIDTH)
        heads = self.q(windows).unflatten(2, (4, 4)).transpose(1, 2)
        z = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        z = self.o(z).view(-1, 2, 2, 2, 2, WIDTH).transpose(2, 3).reshape(-1, 4, 4, WIDTH)
        x = x + z.roll((1, 1), (1, 2)).flatten(1, 2)
        rows = (x + self.down(self.up(self.norm(x)).relu())).view(-1, 4, 4, WIDTH)
        return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1).flatten(1, 2)


ODD = {
    Latent: ({"*.q": "colwise", "*.up": "colwise", "*.o": "rowwise"}, 8),
    Windows: ({"*.q": "colwise", "*.o": "rowwise", **MIXER}, 16),
}


@pytest.mark.parametrize("kind", ODD)
def test_attention_of_other_forms_trains_on_token_shards(kind: type[nn.Module]) -> None:
    rules, tokens = ODD[kind]
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind())
    batch = {"input": torch.randn(2, tokens, WIDTH)}
    assert_equal((model, batch, lambda y, batch: y.square().mean()), rules)
