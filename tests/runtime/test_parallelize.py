"""``parallelize`` on a real model: one process, and every refusal that needs no second one."""

import gc
import weakref

import pytest
import torch

import autoshard
from autoshard.diagnostics import AutoshardError, BatchError, MeshError, PlanError
from autoshard.testing.models import tiny_gpt, token_batch

LENGTH = 8
PLAN = "autoshard 1\nbatch { micro_batch_size = 2, num_microbatches = 2 }\n"
TWO = "autoshard 1\nmesh { tp = 2 }\nbatch { micro_batch_size = 4 }\n"


@pytest.fixture(scope="module")
def trained():
    """Train one engine and the plain model beside it; later tests only read."""
    torch.manual_seed(5)
    model, example, loss = tiny_gpt(batch=4, length=LENGTH)
    engine = autoshard.parallelize(model, PLAN, example=example, loss=loss)
    ours = torch.optim.SGD(engine.parameters(), lr=1e-2, momentum=0.9)
    plain = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    pairs = []
    for step in range(3):
        batch = token_batch(4, LENGTH, seed=step)
        value = loss(model(batch["ids"]), batch)
        value.backward()
        plain.step()
        plain.zero_grad()
        pairs.append((engine.forward_backward(batch), value.detach()))
        ours.step()
        ours.zero_grad()
    return engine, model, pairs, loss


def test_five_changed_lines_train_as_before(trained):
    engine, model, pairs, _ = trained
    for mine, theirs in pairs:
        assert torch.allclose(mine, theirs, rtol=1e-5)
    state = engine.full_state_dict()
    assert list(state) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, atol=1e-5), name


def test_tied_parameters_come_once_by_name_and_twice_in_the_state_dict(trained):
    engine, model, *_ = trained
    names = [name for name, _ in engine.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    state = engine.full_state_dict()
    assert state["wte.weight"] is state["head.weight"]
    model.load_state_dict(state)


def test_evaluate_gives_the_loss_in_eval_mode_and_no_gradients(trained):
    engine, model, _, loss = trained
    model.load_state_dict(engine.full_state_dict())
    batch = token_batch(4, LENGTH, seed=9)
    expected = loss(model.eval()(batch["ids"]), batch)
    model.train()
    assert torch.allclose(engine.evaluate(batch), expected, rtol=1e-5)
    assert all(p.grad is None for p in engine.parameters())


def test_the_graph_after_a_group_of_passes_is_a_graph_module(trained):
    engine, *_ = trained
    module = engine.graph("tensor")
    assert isinstance(module, torch.fx.GraphModule)
    assert "linear" in module.code
    with pytest.raises(AutoshardError, match="there is no stage 1"):
        engine.graph("pipeline", stage=1)


def test_the_engine_keeps_no_weight_of_the_plain_model_alive():
    model, example, loss = tiny_gpt(layers=1, batch=4, length=LENGTH)
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    engine = autoshard.parallelize(model, PLAN, example=example, loss=loss)
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights)
    assert engine.forward_backward(example).isfinite()


def test_a_longer_batch_compiles_a_second_program(trained):
    engine, *_ = trained
    before = engine.stats()["programs"]
    engine.forward_backward(token_batch(4, LENGTH - 2))
    engine.zero_grad()
    assert engine.stats()["programs"] == before + 1


def test_a_batch_of_another_size_is_refused_with_the_plan_line(trained):
    engine, *_ = trained
    with pytest.raises(BatchError) as caught:
        engine.forward_backward(token_batch(3, LENGTH))
    assert "has 3 samples, the plan needs 4" in str(caught.value)
    assert "plan:2:" in str(caught.value)


def test_a_plan_for_two_ranks_without_torchrun_says_how_to_start_it():
    model, example, loss = tiny_gpt(batch=4, length=LENGTH)
    with pytest.raises(MeshError) as caught:
        autoshard.parallelize(model, TWO, example=example, loss=loss)
    assert "AS302" in str(caught.value)
    assert "this plan needs 2 processes: torchrun --nproc-per-node 2 train.py" in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_another_number_of_processes_is_refused_before_any_group_starts(monkeypatch):
    for name, value in dict(RANK=0, WORLD_SIZE=3, MASTER_ADDR="x", MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(value))
    model, example, loss = tiny_gpt(batch=4, length=LENGTH)
    with pytest.raises(PlanError, match="2 places but 3 processes were started"):
        autoshard.parallelize(model, TWO, example=example, loss=loss)
    assert not torch.distributed.is_initialized()


def test_settings_that_can_not_run_yet_are_refused():
    model, example, loss = tiny_gpt(batch=4, length=LENGTH)
    plan = PLAN + "tensor { h.*.mlp.up: experts }\n"
    with pytest.raises(AutoshardError, match="style `experts`"):
        autoshard.parallelize(model, plan, example=example, loss=loss)


def test_a_plan_may_be_a_file_or_a_plan_object(tmp_path):
    (tmp_path / "x.plan").write_text(TWO)
    model, example, loss = tiny_gpt(batch=4, length=LENGTH)
    built = autoshard.Plan(mesh={"tp": 2}, batch={"micro_batch_size": 4})
    for plan in (tmp_path / "x.plan", str(tmp_path / "x.plan"), built):
        with pytest.raises(MeshError, match="needs 2 processes"):
            autoshard.parallelize(model, plan, example=example, loss=loss)
    with pytest.raises(PlanError, match="can't read the plan"):
        autoshard.parallelize(model, "nowhere.plan", example=example, loss=loss)


def test_a_model_on_meta_trains_after_init():
    with torch.device("meta"):
        model, _, loss = tiny_gpt(batch=4, length=LENGTH)
    example = token_batch(4, LENGTH)

    def init(name, tensor):
        torch.nn.init.normal_(tensor, std=0.02)

    engine = autoshard.parallelize(model, PLAN, example=example, loss=loss, init=init)
    assert engine.forward_backward(example).isfinite()
    assert "not compared" in str(engine.report())
