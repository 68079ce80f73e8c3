"""Each idea has one spelling after canonicalize, and the numbers stay bit for bit."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.ir.capture import capture
from autoshard.ir.evaluate import model_tensors, run_reference
from autoshard.ir.graph_function import BUFFER
from autoshard.ir.node_info import info
from autoshard.ir.printer import op_text, print_program
from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from autoshard.passes.canonicalize import Canonicalize
from autoshard.testing.models import tiny_hf


class Body(nn.Module):
    """One layer and then what a case does with its result x (2, 4, 6)."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x)).float().pow(2).sum()


def take(body: Callable[[Tensor], Tensor]) -> tuple[Body, Program, Tensor]:
    model, x = Body(body), torch.randn(2, 4, 6)
    return model, capture(model, (x,), mesh=Mesh.of(), compare=False), x


def ops_of(program: Program) -> list[str]:
    skipped = ("linear", "pow", "sum", "getitem")
    names = [op_text(n) for n in program.forward.graph.nodes if n.op == "call_function"]
    return [name for name in names if name not in skipped]


CASES: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "split": (lambda x: x.split(2, -1)[1], ["split_with_sizes"]),
    "split by sizes": (lambda x: x.split([2, 4], 2)[1], ["split_with_sizes"]),
    "chunk": (lambda x: x.chunk(3, -1)[1], ["split_with_sizes"]),
    "a whole slice": (lambda x: x[:, :, 0:], []),
    "torch's second names": (lambda x: torch.multiply(x, x).negative(), ["mul", "neg"]),
    "swapped axes": (lambda x: x.swapaxes(-1, 1), ["transpose"]),
    "a join by its second name": (lambda x: torch.concat((x, x), -1), ["cat"]),
    "a slice": (lambda x: x[..., -2:], ["slice"]),
    "an index by a list of neighbours": (lambda x: x[:, [-2, -1]], ["slice"]),
    "an index by a list of others": (lambda x: x[:, [2, 0]], ["index"]),
    "add zero": (lambda x: x + 0, []),
    "subtract zero": (lambda x: x - 0.0, []),
    "times one": (lambda x: x * 1.0, []),
    "times one that casts": (lambda x: x + (x > 0) * 1.0, ["gt", "mul", "add"]),
    "reshapes": (lambda x: x.view(8, 6).reshape(2, 24).flatten(), ["reshape"]),
    "there and back": (lambda x: x.view(8, 6).view(2, 4, 6), []),
    "expand to itself": (lambda x: x.expand(2, -1, 6), []),
    "expand": (lambda x: x[:, :1].expand(-1, 4, -1), ["slice", "expand"]),
    "permute of two": (lambda x: x.permute(0, 2, 1), ["transpose"]),
    "permute of none": (lambda x: x.permute(0, 1, 2), []),
    "permute of three": (lambda x: x.permute(1, 2, 0), ["permute"]),
    "squeeze of nothing": (lambda x: x.squeeze(1), []),
    "squeeze": (lambda x: x[:, :1].squeeze(), ["slice", "squeeze"]),
    "ones": (lambda x: x * torch.ones(6), ["full", "mul"]),
    "new zeros": (lambda x: x + x.new_zeros(6), ["full", "add"]),
    "and": (lambda x: x * ((x > 0) & (x < 1)), ["gt", "lt", "bitwise_and", "mul"]),
    "a pool of all": (lambda x: F.adaptive_avg_pool2d(x, 1), ["mean"]),
    "a pool of a row": (lambda x: F.adaptive_avg_pool1d(x, 1), ["mean"]),
    "a pool of parts": (lambda x: F.adaptive_avg_pool2d(x, (1, 2)), ["adaptive_avg_pool2d"]),
    "a cast to the same type": (lambda x: x.to(torch.float32).float(), []),
    "a cast": (lambda x: x.double(), ["to_copy", "to_copy"]),
    "a constant fill": (lambda x: x.masked_fill(x > 0, torch.tensor(0.5)), ["gt", "masked_fill"]),
}


@pytest.mark.parametrize("name", CASES)
def test_it_has_one_spelling(name: str) -> None:
    body, expected = CASES[name]
    model, program, x = take(body)
    before = run_reference(program, model_tensors(model), (x,))
    Canonicalize().run(program, None)
    after = run_reference(program, model_tensors(model), (x,))
    assert ops_of(program) == expected
    assert torch.equal(before.loss, after.loss)
    assert all(torch.equal(before.grads[k], after.grads[k]) for k in before.grads)


def test_a_lifted_number_is_written_into_the_graph() -> None:
    model, program, x = take(lambda x: torch.where(x > 0, x, torch.tensor(0.5)))
    assert list(program.constants) == ["constant.0"]
    Canonicalize().run(program, None)
    assert not program.constants and not program.forward.named(BUFFER)
    assert "full([], 0.5, dtype=f32)" in print_program(program)
    assert run_reference(program, model_tensors(model), (x,)).loss > 0


def test_writes_to_parts_become_joins() -> None:
    def body(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = 0.0
        y[:, 2:3] = x[:, :1]
        return y

    model, program, x = take(body)
    before = run_reference(program, model_tensors(model), (x,))
    Canonicalize().run(program, None)
    assert not {"slice_scatter", "select_scatter", "copy", "fill"} & set(ops_of(program))
    after = run_reference(program, model_tensors(model), (x,))
    assert torch.equal(before.grads["fc.weight"], after.grads["fc.weight"])


def test_dimensions_count_from_the_front() -> None:
    _, program, _ = take(lambda x: x.softmax(-1).unsqueeze(-1).transpose(-1, -2).cumsum(-2))
    Canonicalize().run(program, None)
    text = print_program(program, fold=False)
    for part in ("softmax(fc, 2)", "unsqueeze(softmax, 3)", ", 3, 2)", "cumsum(transpose, 2)"):
        assert part in text, text


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_a_second_run_changes_nothing(kind: str) -> None:
    model, batch, loss = tiny_hf(kind, layers=1)
    program = capture(model, batch, loss, mesh=Mesh.of(), compare=False)
    Canonicalize().run(program, None)
    text = print_program(program, fold=False)
    passes = [info(n).passes for n in program.forward.graph.nodes]
    Canonicalize().run(program, None)
    assert print_program(program, fold=False) == text
    assert [info(n).passes for n in program.forward.graph.nodes] == passes
