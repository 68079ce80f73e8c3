"""Capture gives one faithful forward graph with named ports."""

import math
import resource

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autoshard.ir.batch import batch_leaves, leaf_specs
from autoshard.ir.capture import capture
from autoshard.ir.evaluate import model_tensors, run_reference
from autoshard.ir.graph_function import BATCH, BUFFER, LOSS, OUTPUT, PARAM, RNG, GraphFunction
from autoshard.ir.node_info import info
from autoshard.ir.printer import print_function
from autoshard.ir.program import Program
from autoshard.ir.user_line import user_line
from autoshard.mesh import Mesh
from autoshard.ops.dropout import DropoutArgs, dropout
from autoshard.testing.models import tiny_gpt, tiny_hf
from tests.ir import models

MESH = Mesh.of(tp=2)
BATCH_4 = (torch.randn(4, 4),)
aten = torch.ops.aten


def take(model: nn.Module, batch: object = BATCH_4, **options: object) -> Program:
    return capture(model, batch, mesh=MESH, **options)


def calls(function: GraphFunction, *targets: object) -> list[fx.Node]:
    nodes = [n for n in function.graph.nodes if n.op == "call_function"]
    return [n for n in nodes if not targets or n.target in targets]


def test_ports_name_parameters_batch_and_loss() -> None:
    model, batch, loss = tiny_gpt(dropout=0.1)
    function = capture(model, batch, loss, mesh=MESH).forward
    assert list(function.named(BATCH)) == ["ids", "labels"]
    assert list(function.named(PARAM)) == [name for name, _ in model.named_parameters()]
    assert [port.kind for port in function.outputs] == [LOSS]
    assert function.node(RNG).meta["val"].dtype is torch.int64


def test_every_node_has_a_module_path_of_the_model_and_a_line_of_its_author() -> None:
    model, batch, loss = tiny_gpt(dropout=0.1)
    function = capture(model, batch, loss, mesh=MESH, compare=False).forward
    paths = dict(model.named_modules())
    assert all(info(n).path in paths for n in calls(function))
    assert all(info(n).source.startswith("models.py:") for n in calls(function))
    (split, *_) = calls(function, aten.split.Tensor)
    assert info(split).path == "h.0.attn" and "self.qkv(x).split" in info(split).source
    (loss_node,) = calls(function, aten.cross_entropy_loss.default)
    assert info(loss_node).path == "" and "F.cross_entropy" in info(loss_node).source


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_decoder_called_with_labels_gives_the_bits_of_its_loss(kind: str) -> None:
    """Case T1: plain fx traces none of these."""
    model, batch, loss = tiny_hf(kind)
    program = capture(model, batch, loss, mesh=MESH)
    assert program.compared.loss == 0.0
    linear = calls(program.forward, aten.linear.default)
    paths = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    assert {info(n).path for n in linear} == paths
    assert all(info(n).source.startswith(f"modeling_{kind}.py:") for n in linear)


@pytest.mark.parametrize("training", [True, False])
def test_functional_dropout_follows_the_mode_of_the_program(training: bool) -> None:
    """Case T3: a program for eval drops nothing, whatever the mode the model was in."""
    model, x = models.DropoutBlock().train(not training), torch.randn(4, 8)
    program = take(model, (x,), training=training)
    assert len(calls(program.forward, dropout)) == 2 * training
    runs = [
        run_reference(program, model_tensors(model), (x,), rng=(1, step, 0)).loss
        for step in (0, 0, 1)
    ]
    assert runs[0] == runs[1] and (runs[1] != runs[2]) == training
    if not training:
        torch.testing.assert_close(runs[0], model.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "names"), [("gpt2", 2), ("opt", 2), ("t5", 3)])
def test_a_tied_weight_is_one_input_whose_gradient_sums_its_uses(kind: str, names: int) -> None:
    """Case T7."""
    model, batch, loss = tiny_hf(kind)
    program = capture(model, batch, loss, mesh=MESH)
    tied = next(spec for spec in program.params if spec.aliases)
    assert len((tied.fqn, *tied.aliases)) >= names
    assert all(program.params[alias] is tied for alias in tied.aliases)
    assert not set(program.forward.named(PARAM)) & set(tied.aliases)
    ours = run_reference(program, model_tensors(model), batch)
    model(**batch).loss.backward()
    torch.testing.assert_close(ours.grads[tied.fqn], dict(model.named_parameters())[tied.fqn].grad)


def test_nested_lists_and_dicts_of_modules_keep_their_true_paths() -> None:
    """Case T13."""
    model = models.Nested()
    program = take(model)
    linear = calls(program.forward, aten.linear.default)
    paths = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    assert {info(n).path for n in linear} == paths and program.compared.loss == 0.0
    assert {"blocks.2", "towers.left.1", "grid.1.0"} <= paths


@pytest.mark.parametrize("return_dict", [True, False])
def test_keyword_batches_work_for_both_kinds_of_output(return_dict: bool) -> None:
    """Case T15."""
    model, batch, _ = tiny_hf("llama")
    batch["return_dict"] = return_dict
    head = "loss" if return_dict else 0
    program = capture(model, batch, lambda output, batch: output[head] * 2.0, mesh=MESH)
    assert program.compared.was_compared and list(program.forward.named(BATCH)) == list(batch)[:2]


def test_a_model_that_names_its_arguments_gets_only_those() -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (output * batch["weight"]).sum()

    batch = {"weight": torch.rand(4, 4), "input": BATCH_4[0]}
    program = capture(nn.Linear(4, 4), batch, loss, mesh=MESH)
    assert list(program.forward.named(BATCH)) == ["weight", "input"]


def test_nested_batches_are_named_by_path_and_other_values_are_constants() -> None:
    class Nested(nn.Module):
        def forward(self, inputs: dict, scale: float) -> Tensor:
            return (inputs["x"][0] * scale * inputs["x"][1]).sum()

    batch = {"inputs": {"x": (torch.rand(4), torch.rand(1)), "tag": "a"}, "scale": 3.0}
    program = capture(Nested(), batch, mesh=MESH, training=False)
    assert list(program.forward.named(BATCH)) == ["inputs.x.0", "inputs.x.1"]
    assert [leaf.is_split for leaf in program.leaves] == [True, False]


def test_one_tensor_given_twice_is_two_inputs() -> None:
    ids = torch.randn(2, 3)
    batch = {"input": ids, "labels": ids}
    program = capture(
        nn.Linear(3, 3), batch, lambda out, batch: F.mse_loss(out, batch["labels"]), mesh=MESH
    )
    assert list(program.forward.named(BATCH)) == ["input", "labels"]


def test_an_eval_program_without_loss_gives_the_leaves_of_the_output() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"logits": x * 2, "hidden": (x + 1, x - 1), "note": "text"}

    program = take(Two(), training=False)
    assert [port.name for port in program.forward.outputs] == ["logits", "hidden.0", "hidden.1"]
    assert {port.kind for port in program.forward.outputs} == {OUTPUT}


def test_a_symbolically_traced_module_is_captured_like_any_other() -> None:
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    program = capture(model, BATCH_4, lambda out, batch: out.mean(), mesh=MESH)
    paths = [info(n).path for n in calls(program.forward, aten.linear.default)]
    assert paths == ["0", "2"] and program.compared.loss == 0.0


@pytest.mark.parametrize(
    "model",
    [
        models.NoGrad(),
        models.PassesThrough(),
        models.Autocast(),
        models.WritesInPlace(),
        models.DropsInPlace(),
        models.Squares(),
        models.Recurrent(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_what_export_alone_gets_wrong_keeps_its_gradients(model: nn.Module) -> None:
    report = take(model).compared
    assert report.was_compared and report.gradient < 1e-5


def test_dropout_in_place_is_our_dropout_too() -> None:
    function = take(models.DropsInPlace()).forward
    (node,) = calls(function, dropout)
    (product,) = calls(function, aten.mul.Tensor)
    assert product.args == (node, node)


def test_a_region_without_gradients_is_detached_only_where_it_ends() -> None:
    program = take(models.NoGrad())
    assert len(calls(program.forward, aten.detach.default)) == 2  # target, .data


def test_a_constant_cached_in_an_attribute_is_part_of_the_graph() -> None:
    model = models.CachesMask()
    program = take(model)
    assert calls(program.forward, aten.tril.default) and model.mask is None


def test_views_have_one_spelling_and_copies_go() -> None:
    class Views(models.Plain):
        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x).t().contiguous().view(2, 8).clone().flatten().detach()
            return (self.fc(x).flatten() * y).sum()

    function = take(Views()).forward
    noise = (aten.view.default, aten._unsafe_view.default, aten.clone.default)
    assert not calls(function, *noise) and len(calls(function, aten.detach.default)) == 1


def test_buffers_and_constants_are_inputs_of_their_own() -> None:
    class Holder(models.Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4), persistent=False)
            self.register_buffer("unused", torch.ones(4))
            self.table = torch.arange(4.0)

        def forward(self, x: Tensor) -> Tensor:
            return (self.fc(x) * self.scale * self.table).sum()

    program = take(Holder())
    assert list(program.forward.named(BUFFER)) == ["scale", "constant.0"]
    assert torch.equal(program.constants["constant.0"], torch.arange(4.0))
    assert not program.params["scale"].persistent and program.params["unused"].persistent


def test_a_frozen_parameter_is_an_input_without_gradient() -> None:
    model = models.Plain()
    model.fc.bias.requires_grad_(False)
    program = take(model)
    assert [spec.fqn for spec in program.params.trainable()] == ["fc.weight"]
    assert list(run_reference(program, model_tensors(model), BATCH_4).grads) == ["fc.weight"]


def test_dropout_sites_do_not_depend_on_the_mesh() -> None:
    model, batch, loss = tiny_gpt(dropout=0.1)
    sites = []
    for mesh in (MESH, Mesh.of(pp=2, dp=2)):
        function = capture(model, batch, loss, mesh=mesh, compare=False).forward
        nodes = calls(function, dropout)
        sites.append([(DropoutArgs(*n.args).site, info(n).path) for n in nodes])
    assert sites[0] == sites[1] and [site for site, _ in sites[0]] == list(range(6))


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
def test_attention_with_dropout_is_spelled_out_around_it(mask: str) -> None:
    class Attends(models.Plain):
        def forward(self, x: Tensor) -> Tensor:
            q, k = self.fc(x).view(2, 4, 4, 4), self.fc(x).view(2, 4, 4, 4)[:, :2]
            seen = torch.ones(4, 4).tril().bool().index_fill(0, torch.tensor([2]), False)
            given = {"none": None, "causal": None, "bool": seen, "float": seen.float()}[mask]
            out = F.scaled_dot_product_attention(
                q, k, k, given, 0.25, mask == "causal", scale=0.3, enable_gqa=True
            )
            return out.pow(2).sum()

    program = take(Attends(), (torch.randn(2, 16, 4),))
    assert not calls(program.forward, aten.scaled_dot_product_attention.default)
    assert program.compared.loss < 1e-6 and program.compared.gradient < 1e-5


def test_leaves_of_one_sample_are_split_when_all_are() -> None:
    leaves = batch_leaves({"a": torch.zeros(1, 3), "b": torch.zeros(1), "c": torch.zeros(())})
    assert [leaf.is_split for leaf in leaf_specs(leaves)] == [True, True, False]


def test_skipping_torchs_own_functionalization_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch, loss = tiny_hf("llama", layers=1)
    texts = []
    for known in (True, False):
        monkeypatch.setattr("autoshard.ir.capture.is_functional", lambda graph, known=known: known)
        program = capture(model, batch, loss, mesh=MESH, compare=False)
        texts.append(print_function(program.forward, fold=False))
    assert texts[0] == texts[1]


def test_bloom_176b_on_the_meta_device_is_captured_without_its_numbers() -> None:
    sizes = {"layers": 70, "width": 14336, "heads": 112, "vocab": 250880, "length": 2048}
    model, batch, loss = tiny_hf("bloom", batch=2, **sizes, device="meta")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    program = capture(model, batch, loss, mesh=MESH)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sum(math.prod(spec.shape) for spec in program.params) > 176e9
    assert not program.compared.was_compared and grown_kib < 1 << 20
    assert "70 x transformer.h.0 .. transformer.h.69" in print_function(program.forward)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["<string>", "<frozen importlib>"], "<string>:2"),  # `python -c`
        (["<python-input-3>", "<eval_with_key>.1"], "<python-input-3>:2"),  # a prompt
        (["mine.py", "<string>"], "mine.py:2"),  # a dataclass' own __init__
        (["<eval_with_key>.1"], ""),
    ],
)
def test_code_of_no_file_is_told_where_there_is_no_other(files, told):
    assert user_line("\n".join(f'File "{file}", line 2, in loss' for file in files)) == told
