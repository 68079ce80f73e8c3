"""What capture would get wrong stops, by name, with the user's line and the way out."""

import pytest
import torch
from torch import nn

from autoshard.diagnostics import CaptureError
from autoshard.ir.capture import capture
from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from tests.ir import models

MESH = Mesh.of(tp=2)
BATCH = (torch.randn(4, 4),)


def take(model: nn.Module, **options: object) -> Program:
    return capture(model, BATCH, mesh=MESH, **options)


REFUSED = [
    (models.Branching(), "AS701", "depends on the values of a tensor", "if x.sum() > 0:"),
    (models.ReadsItem(), "AS701", "depends on the values of a tensor", ".item()"),
    (models.MasksByValue(), "AS701", "a shape depends on", "x[x > 0]"),
    (models.Conditional(), "AS701", "control flow `cond`", "torch.cond"),
    (models.Quantizes(), "AS702", "autograd.Function `StraightThrough`", "StraightThrough.apply"),
    (models.Checkpoints(True), "AS702", "activation checkpointing", "run(self.fc"),
    (models.Checkpoints(False), "AS702", "activation checkpointing", "run(self.fc"),
    (models.InferenceMode(), "AS702", "torch.inference_mode()", "with torch.inference_mode"),
    (models.HidesParameter(), "AS702", "reads parameter `fc.weight` by way of", "nn.Parameter"),
    (models.ThirdPartyKernel(), "AS705", "`autoshard_test.no_backward.default` has no", "sum()"),
    (models.UnknownKernel(), "AS705", "without a fake implementation", "no_fake(self.fc"),
    (models.Counts(), "AS706", "updates its buffer `calls`", "outside the model"),
    (models.WritesInput(), "AS706", "writes into its input `0` in place", "x.clone()"),
    (models.BatchNorm(), "AS706", "`norm` is a BatchNorm1d in train mode", "get_submodule('norm')"),
    (models.TracksInstances(), "AS706", "`norm` is a InstanceNorm1d in train", "GroupNorm"),
    (models.Recurrent(0.5), "AS709", "random operator `aten.lstm.input` in `rnn`", "nn.Dropout"),
    (models.FunctionalBatchNorm(), "AS706", "batch statistics", "F.batch_norm"),
    (models.Looks(max_norm=1.0), "AS706", "into its parameter `table.weight` in place", "copy"),
    (models.Looks(sparse=True), "AS706", "`sparse=True` in `table`", "self.table("),
    (models.Looks(scale_grad_by_freq=True), "AS706", "`scale_grad_by_freq=True`", "one rank"),
    (models.Remembers(), "AS707", "keeps a tensor in its attribute `memory`", "return it"),
    (models.Collects(), "AS707", "keeps a tensor in its attribute `seen`", "return it"),
    (models.Noise(), "AS709", "random operator `aten.rand_like.default`", "torch.rand_like(x)"),
    (models.ComplexGate(), "AS703", "`gate` is a trained parameter of complex", "view_as_real(w)"),
    (models.NeedsMask(), "AS700", "'NoneType' object is not subscriptable", "(attention_mask,"),
    (models.Mistake(), "AS700", "RuntimeError: shape '[3, 5]' is invalid", "x.view(3, 5)"),
]


@pytest.mark.parametrize(
    ("model", "code", "message", "detail"), REFUSED, ids=[type(row[0]).__name__ for row in REFUSED]
)
def test_it_is_refused_by_name(
    model: nn.Module, code: str, message: str, detail: str, capfd: pytest.CaptureFixture
) -> None:
    before = dict(model.__dict__), list(getattr(model, "seen", []))
    with pytest.raises(CaptureError) as caught:
        take(model)
    text = str(caught.value)
    assert caught.value.code == code and message in text and detail in text and "= help: " in text
    assert (dict(model.__dict__), list(getattr(model, "seen", []))) == before
    assert capfd.readouterr() == ("", ""), "torch's own report must not reach the user"


def test_a_data_dependent_branch_is_shown_with_its_line() -> None:
    with pytest.raises(CaptureError) as caught:
        take(models.Branching())
    lines = str(caught.value).splitlines()
    assert lines[0] == "error[AS701]: what the model does depends on the values of a tensor"
    number = caught.value.span.line
    assert lines[1].strip() == f"--> models.py:{number}:1"
    assert lines[3] == f"{number} | if x.sum() > 0:"


def test_a_data_dependent_line_in_a_submodule_is_named_with_its_path() -> None:
    model = nn.Sequential(nn.Linear(4, 4), models.Branching())
    with pytest.raises(CaptureError, match="values of a tensor in `1`"):
        take(model)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_a_hook_on_a_submodule_is_refused(kind: str) -> None:
    model = models.Plain()
    getattr(model.fc, f"register_{kind}")(lambda *args: None)
    with pytest.raises(CaptureError, match=r"`fc` has a .*hook") as caught:
        take(model)
    assert caught.value.code == "AS704"


def test_a_hook_on_a_parameter_is_refused() -> None:
    model = models.Plain()
    model.fc.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(CaptureError, match=r"parameter `fc\.weight` has a gradient hook"):
        take(model)


def test_a_hook_on_all_modules_is_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        with pytest.raises(CaptureError, match="a forward hook on all modules"):
            take(models.Plain())
    finally:
        handle.remove()


def test_a_wrapped_or_compiled_model_is_refused() -> None:
    compiled = models.Plain()
    compiled.compile()
    for model in (nn.DataParallel(models.Plain()), torch.compile(models.Plain()), compiled):
        with pytest.raises(CaptureError) as caught:
            take(model)
        assert caught.value.code == "AS703"


def test_a_model_on_two_devices_is_refused_with_both() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(CaptureError, match=r"`0\.weight` on cpu, `1\.weight` on meta"):
        take(model)


def test_parameters_that_share_memory_are_refused_unless_they_are_one_or_lie_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    with pytest.raises(CaptureError, match=r"`0\.weight` and `1\.weight` share memory") as caught:
        take(model)
    assert caught.value.code == "AS703" and "tie them" in str(caught.value)
    wide = torch.randn(4, 8)
    model[0].weight, model[1].weight = nn.Parameter(wide[:, :4]), nn.Parameter(wide[:, 4:])
    assert take(model, training=False).forward is not None
    model[1].weight = model[0].weight
    assert take(model, training=False).forward is not None


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(CaptureError, match="not initialized"):
        take(nn.LazyLinear(3))


def test_training_without_a_loss_is_refused_and_evaluation_is_not() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match="Linear returned no loss, but `0`"):
        take(model)
    assert [port.kind for port in take(model, training=False).forward.outputs] == ["output"]


def test_a_loss_that_is_not_one_number_is_refused_with_its_shape() -> None:
    with pytest.raises(CaptureError, match=r"loss of shape \[4, 4\]"):
        capture(nn.Linear(4, 4), BATCH, lambda output, batch: output, mesh=MESH)


def test_a_batch_that_lacks_an_argument_is_refused_with_both_lists() -> None:
    with pytest.raises(CaptureError, match="forward needs `x`; the batch has `ids`"):
        capture(models.Plain(), {"ids": BATCH[0]}, mesh=MESH)


def test_frozen_batch_norm_is_captured() -> None:
    model = models.BatchNorm()
    model.norm.eval()
    assert take(model).compared.was_compared
