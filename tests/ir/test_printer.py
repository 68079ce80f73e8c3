"""The print names values by module path, folds equal blocks and shows what a reader looks for."""

import pytest
import torch
from torch import Tensor, nn

from autoshard.ir.capture import capture
from autoshard.ir.graph_function import PARAM, SAVED, GraphFunction, Port
from autoshard.ir.node_info import info
from autoshard.ir.placement import PARTIAL, Shard
from autoshard.ir.printer import function_lines, print_function, print_program, type_text
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.mesh import Mesh
from autoshard.ops.collectives import all_reduce
from autoshard.testing.models import tiny_gpt

aten = torch.ops.aten


@pytest.fixture
def program() -> Program:
    model, batch, loss = tiny_gpt(layers=3, dropout=0.1)
    return capture(model, batch, loss, mesh=Mesh.of(tp=2), compare=False)


def gelu_of(function: GraphFunction, path: str) -> torch.fx.Node:
    nodes = function.graph.find_nodes(op="call_function", target=aten.gelu.default)
    return next(n for n in nodes if info(n).path == path)


def test_a_line_names_value_type_operator_and_the_users_line(program: Program) -> None:
    lines = print_function(program.forward, fold=False).splitlines()
    assert "param h.1.attn.qkv.weight: f32[96, 32]" in lines
    assert "batch ids: i64[4, 16]" in lines and "rng: i64[3]" in lines
    assert lines[-1] == "return loss = cross_entropy_loss"
    (linear,) = (line for line in lines if line.startswith("h.1.attn.qkv:"))
    head, _, place = linear.partition("  # ")
    given = "linear(h.1.ln_1, h.1.attn.qkv.weight, h.1.attn.qkv.bias)"
    assert head == f"h.1.attn.qkv: f32[4, 16, 96] = {given}" and place.startswith("models.py:")


def test_parts_of_a_value_are_read_in_place(program: Program) -> None:
    text = print_function(program.forward, fold=False)
    assert "reshape(h.0.attn.split[1], [4, 16, 8, 4])" in text and "getitem" not in text


def test_two_captures_of_one_model_print_alike(program: Program) -> None:
    model, batch, loss = tiny_gpt(layers=3, dropout=0.1)
    again = capture(model, batch, loss, mesh=Mesh.of(tp=2), compare=False)
    next(iter(again.forward.graph.nodes)).name = "renamed"
    assert print_program(again) == print_program(program)


def test_names_are_unique_even_where_modules_are_called_like_counted_values() -> None:
    class Confusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_2 = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.add_2(x + 1.0) + x + 2.0
            return y.sum()

    program = capture(Confusing(), (torch.randn(2, 4),), mesh=Mesh.of(), compare=False)
    names = [line.partition(":")[0] for _, line in function_lines(program.forward)]
    assert len(set(names)) == len(names)


def test_equal_blocks_are_printed_once_with_their_number(program: Program) -> None:
    text = print_function(program.forward)
    assert text.count("3 x h.0 .. h.2") == 2  # the parameters, and the calls
    assert "h.1.attn.qkv" not in text and "  h.0.attn.qkv: " in text and "h.2.add_2" in text


def test_a_block_that_differs_is_printed_by_itself(program: Program) -> None:
    gelu_of(program.forward, "h.1.mlp").kwargs = {"approximate": "tanh"}
    text = print_function(program.forward)
    assert "2 x h.0, h.2" in text and 'gelu(h.1.mlp.up, approximate="tanh")' in text


def test_a_collective_shows_axis_and_bytes_and_leaves_other_names_alone(program: Program) -> None:
    before = dict(_named(program.forward))
    gelu = gelu_of(program.forward, "h.0.mlp")
    rewriter = Rewriter(program.forward, "test")
    with rewriter.after(gelu):
        made = rewriter.call(all_reduce, gelu, "tp", like=gelu, placements={"tp": PARTIAL})
    gelu.replace_all_uses_with(made, lambda user: user is not made)
    after = dict(_named(program.forward))
    new = after.keys() - before.keys()
    assert new == {"h.0.mlp.all_reduce"} and before.keys() <= after.keys()
    line = after["h.0.mlp.all_reduce"]
    assert ': f32[4, 16, 128] P(sum)@tp = all_reduce(h.0.mlp.gelu, axis="tp")' in line
    assert "  <== tp 32 KiB" in line


def _named(function: GraphFunction) -> list[tuple[str, str]]:
    return [(line.partition(":")[0], line) for _, line in function_lines(function)]


def test_placements_follow_the_type(program: Program) -> None:
    gelu = gelu_of(program.forward, "h.0.mlp")
    Rewriter(program.forward, "test").annotate(gelu, placements={"tp": Shard(2), "dp": Shard(0)})
    line = dict(_named(program.forward))["h.0.mlp.gelu"]
    assert line.startswith("h.0.mlp.gelu: f32[4, 16, 128] S(2)@tp S(0)@dp = gelu(h.0.mlp.up)")


def test_a_lowered_graph_prints_as_a_skeleton(program: Program) -> None:
    function = program.forward
    gelu = gelu_of(function, "h.0.mlp")
    ports = (*function.outputs, Port(SAVED, "a"))
    function.set_outputs((*function.results, gelu), ports)
    text = print_function(function)
    assert "h.0.attn: ... " in text and " aten ops" in text
    assert "h.0.attn.qkv: f32[4, 16, 96] = linear(" in text and "dropout(" in text
    assert "transpose" not in text and "return saved:a = h.0.mlp.gelu" in text
    assert "transpose" in print_function(function, fold=False)


def test_types_are_short() -> None:
    value = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert type_text((value, torch.zeros((), dtype=torch.bool))) == "(bf16[2, 3], bool[])"


def test_every_parameter_has_a_line(program: Program) -> None:
    names = {name for name, _ in _named(program.forward)}
    assert {f"param {fqn}" for fqn in program.forward.named(PARAM)} <= names
