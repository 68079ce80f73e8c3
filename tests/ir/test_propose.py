"""Proposals of tensor parallel rules: found by following the graph, and refused for a reason."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoshard.dsl.draft_rules import proposed_rules
from autoshard.ir.capture import capture
from autoshard.ir.facts import describe
from autoshard.ir.propose import propose
from autoshard.mesh import Mesh
from autoshard.model_facts import Proposal
from autoshard.testing.models import tiny_gpt, tiny_hf, tiny_mlp


def proposed(built: tuple, size: int = 2) -> Proposal:
    model, batch, loss = built
    return propose(capture(model, batch, loss, mesh=Mesh(()), compare=False), size)


def styles(proposal: Proposal) -> dict[str, str]:
    return {split.param: split.style for split in proposal.splits}


class Anonymous(nn.Module):
    """A pair of products whose names say nothing, with ``between`` in the middle."""

    def __init__(self, between: nn.Module, hidden: int = 16) -> None:
        super().__init__()
        self.a, self.between, self.b = nn.Linear(8, hidden), between, nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return a 0-d loss of rows x."""
        return self.b(self.between(self.a(x))).pow(2).mean()


class Residual(nn.Module):
    """Add what the second product reads to what it gives, so that neither can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return a 0-d loss of rows x."""
        x = self.a(x)
        return self.c(x + self.b(x)).pow(2).mean()


def anonymous(between: nn.Module, hidden: int = 16) -> tuple:
    return Anonymous(between, hidden), {"x": torch.randn(4, 8)}, None


def test_a_pair_around_an_elementwise_operator_is_found_without_names() -> None:
    found = proposed(anonymous(nn.GELU()))
    assert styles(found) == {"a.weight": "colwise", "b.weight": "rowwise"}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: anonymous(nn.LayerNorm(16)), "'layer_norm' needs it whole"),
        (lambda: anonymous(nn.GELU(), 15), "needs it whole"),
        (lambda: (Residual(), {"x": torch.randn(4, 8)}, None), "stream it reads"),
    ],
    ids=["norm between", "odd width", "residual"],
)
def test_what_would_move_activations_stays_whole_with_a_reason(
    build: Callable[[], tuple], reason: str
) -> None:
    found = proposed(build())
    assert not found.splits
    assert any(reason in whole.why for whole in found.whole)


def test_a_packed_gate_and_a_packed_attention_get_their_parts() -> None:
    gated = {s.param: s.parts for s in proposed(tiny_mlp("gated")).splits}
    assert gated["up.weight"] == (16, 16)
    packed = {s.param: s.parts for s in proposed(tiny_gpt()).splits}
    assert packed["h.0.attn.qkv.weight"] == (32, 32, 32)


def test_heads_that_do_not_divide_leave_the_attention_whole() -> None:
    found = proposed(tiny_gpt(heads=8), size=16)
    assert "h.0.attn.qkv.weight" not in styles(found)
    assert styles(found)["h.0.mlp.up.weight"] == "colwise"


def test_layers_that_are_split_alike_are_one_rule() -> None:
    built = tiny_hf("llama")
    rules = list(proposed_rules(describe(built[0]), proposed(built)))
    assert "model.layers.*.self_attn.q_proj: colwise" in rules
    assert "model.layers.*.mlp.down_proj: rowwise" in rules
    assert "lm_head: vocab" in rules
    assert sum(not rule.startswith("#") for rule in rules) == 9


class Alternating(nn.Module):
    """q, k and v head by head in a layer whose name means "all of q, all of k, all of v"."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.in_proj, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Return a 0-d loss of x (B, S, D)."""
        q, k, v = self.in_proj(x).view(*x.shape[:-1], 4, 24).transpose(1, 2).chunk(3, -1)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2)).pow(2).mean()


def test_a_name_that_says_packed_is_contradicted_where_the_graph_says_otherwise() -> None:
    built = Alternating(), {"x": torch.randn(2, 4, 32)}, None
    assert "in_proj: colwise(parts=1)" in list(proposed_rules(describe(built[0]), proposed(built)))


class Turned(nn.Module):
    """A table that is joined with another to make the head, as MobileBERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rest = nn.Embedding(16, 8), nn.Parameter(torch.randn(8, 16))

    def forward(self, ids: Tensor) -> Tensor:
        """Return a 0-d loss of ids (B, S)."""
        x = self.table(ids)
        head = torch.cat((self.table.weight.t(), self.rest), 0)
        return (torch.cat((x, x), -1) @ head).pow(2).mean()


def test_a_table_that_something_else_reads_too_stays_whole() -> None:
    assert not proposed((Turned(), {"ids": torch.arange(8).view(2, 4)}, None)).splits
