"""What the joint graph holds: one gradient per parameter, paths on backward nodes, no noise."""

import pytest
import torch
from torch import nn

from autoshard.diagnostics import PassError, VerifyError
from autoshard.ir.graph_function import GRAD, TANGENT
from autoshard.ir.invariants_pipeline import check_joint
from autoshard.ir.node_info import info
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import CutStages
from autoshard.passes.lower_joint import LowerJoint
from tests.passes.programs import before, compile_with, context
from tests.passes.toys import WIDTH, Frozen, Gpt, token_batch

aten = torch.ops.aten


def joint(model, batch, *paths: str, **options: bool):
    """Return the lowered program and the remarks; the program keeps the invariant."""
    ctx = context(Mesh.of(pp=1 + len(paths)), pipeline=before(*paths))
    program = compile_with([CutStages(), LowerJoint()], model, batch, ctx, **options)
    check_joint(program)
    return program, ctx.remarks


def test_a_tied_weight_has_one_gradient() -> None:
    program, _ = joint(Gpt(), token_batch())
    grads = [port.name for port in program.stages[0].joint.outputs if port.kind == GRAD]
    assert grads.count("emb.weight") == 1
    assert "head.weight" not in grads


def test_every_node_has_a_path_phase_and_fake_value() -> None:
    program, _ = joint(Gpt(), token_batch())
    graph = program.stages[0].joint.graph
    calls = [n for n in graph.nodes if n.op == "call_function"]
    backward = [n for n in calls if info(n).phase == "B"]
    assert all("val" in n.meta for n in calls)
    assert {info(n).path for n in backward} == {info(n).path for n in calls}
    assert all(info(n).source for n in calls)
    gelu = graph.find_nodes(op="call_function", target=aten.gelu_backward.default)
    assert [info(n).path for n in gelu] == ["h.2", "h.1", "h.0"]


def test_no_noise_of_autograd_is_left() -> None:
    program, _ = joint(Gpt(), token_batch())
    targets = {n.target for n in program.stages[0].joint.graph.nodes}
    assert not targets & {aten.detach.default, aten.alias.default}
    for node in program.stages[0].joint.graph.nodes:
        assert not (node.target is aten.t.default and node.args[0].target is aten.t.default)


def test_only_boundary_values_that_lead_to_trained_parameters_get_gradients() -> None:
    program, _ = joint(Frozen(), (torch.randn(2, WIDTH), torch.randn(2, WIDTH)), "b", "c")
    first, second, third = (stage.joint for stage in program.stages)
    assert not first.named(TANGENT) and not first.named_results(GRAD)
    assert not second.named_results(TANGENT)
    assert set(second.named_results(GRAD)) == {"b.weight"}
    assert set(third.named_results(TANGENT)) == set(second.named(TANGENT))


def test_a_parameter_the_loss_does_not_depend_on_gets_a_remark_and_no_gradient() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return (self.a(x).detach() * self.b(x)).sum()

    program, remarks = joint(Detached(), (torch.randn(2, 4),))
    assert set(program.stages[0].joint.named_results(GRAD)) == {"b.weight", "b.bias"}
    assert any(r.where == "a.weight" and "no gradient" in r.message for r in remarks)


def test_a_loss_without_any_gradient_is_refused() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x).detach().sum()

    with pytest.raises(PassError, match="depends on no trainable parameter"):
        joint(Cut(), (torch.randn(2, 4),))


def test_a_model_without_trained_parameters_is_refused() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x):
            return self.a(x).sum()

    with pytest.raises(PassError, match="no parameter that the model uses is trained"):
        joint(Frozen(), (torch.randn(2, 4),))


def test_an_eval_program_has_no_gradients() -> None:
    program, _ = joint(Gpt(), token_batch(), "h.1", training=False)
    for stage in program.stages:
        assert not stage.joint.named_results(GRAD) and not stage.joint.named(TANGENT)


def test_check_joint_sees_a_gradient_of_the_wrong_shape() -> None:
    program, _ = joint(Gpt(), token_batch())
    function = program.stages[0].joint
    results = list(function.results)
    results[1], results[3] = results[3], results[1]
    function.set_outputs(results, function.outputs)
    with pytest.raises(VerifyError, match="gradient of"):
        check_joint(program)


def test_check_joint_sees_a_gradient_that_nobody_reads() -> None:
    program, _ = joint(Gpt(), token_batch(), "h.1")
    later = program.stages[1].joint
    kept = [(p, n) for p, n in zip(later.outputs, later.results, strict=True) if p.kind != TANGENT]
    later.set_outputs([n for _, n in kept], [p for p, _ in kept])
    with pytest.raises(VerifyError, match="sends gradients of"):
        check_joint(program)
