"""The engine on one rank, without torchrun."""

import warnings

import pytest
import torch

from autoshard.diagnostics import AutoshardError, BatchError, CheckpointError
from tests.runtime.toy import Toy, reference_loss
from tests.runtime.toy_engine import meta_values, toy_engine


def test_a_training_loop_follows_the_plain_one():
    toy = Toy(m=2)
    engine = toy_engine(toy)
    params = {n: torch.nn.Parameter(v.clone()) for n, v in toy.values().items()}
    plain = torch.optim.AdamW(params.values(), lr=0.01)
    ours = torch.optim.AdamW(engine.parameters(), lr=0.01)
    for (batch,) in toy.batches(4):
        expected = reference_loss(params, [batch])
        expected.backward()
        theirs = torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        plain.step()
        plain.zero_grad()
        loss = engine.forward_backward(batch)
        norm = engine.clip_grad_norm_(0.5)
        ours.step()
        ours.zero_grad()
        assert torch.allclose(loss, expected.detach(), rtol=1e-12)
        assert torch.allclose(norm, theirs, rtol=1e-12)
    state = engine.full_state_dict()
    assert list(state) == list(params)
    for name, param in params.items():
        assert torch.allclose(state[name], param.detach(), rtol=1e-12)


def test_gradients_add_up_until_zero_grad_as_in_torch():
    toy = Toy()
    engine = toy_engine(toy)
    ((batch,),) = toy.batches(1)
    engine.forward_backward(batch)
    once = [p.grad.clone() for p in engine.parameters()]
    engine.forward_backward(batch, weight=0.5)
    for parameter, first in zip(engine.parameters(), once, strict=True):
        assert torch.allclose(parameter.grad, 1.5 * first)
    engine.zero_grad(set_to_none=False)
    assert all(p.grad.eq(0).all() for p in engine.parameters())
    engine.zero_grad()
    assert all(p.grad is None for p in engine.parameters())


def test_a_dropped_gradient_of_one_parameter_starts_again():
    toy = Toy()
    engine = toy_engine(toy)
    ((batch,),) = toy.batches(1)
    engine.forward_backward(batch)
    named = dict(engine.named_parameters())
    first = named["a.weight"].grad.clone()
    named["a.weight"].grad = None
    engine.forward_backward(batch)
    assert torch.allclose(named["a.weight"].grad, first)


def test_the_loss_returned_is_not_scaled_by_the_weight():
    toy = Toy()
    engine = toy_engine(toy)
    ((batch,),) = toy.batches(1)
    assert torch.equal(engine.forward_backward(batch), engine.forward_backward(batch, weight=0.1))


def test_optimizer_groups_by_name_work():
    engine = toy_engine(Toy())
    groups = [
        {"params": [p for n, p in engine.named_parameters() if n.startswith("a")], "lr": 0.0},
        {"params": [p for n, p in engine.named_parameters() if n.startswith("b")], "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(groups)
    before = engine.full_state_dict()
    engine.forward_backward(Toy().batches(1)[0][0])
    optimizer.step()
    after = engine.full_state_dict()
    assert torch.equal(before["a.weight"], after["a.weight"])
    assert not torch.equal(before["b.weight"], after["b.weight"])


def test_the_model_of_the_user_is_left_alone():
    values = Toy().values()
    kept = {n: v.clone() for n, v in values.items()}
    engine = toy_engine(Toy(), tensors=values)
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.zero_()
    assert all(torch.equal(values[n], kept[n]) for n in kept)


def test_a_batch_of_the_wrong_size_is_refused_before_anything_runs():
    toy = Toy(m=2)
    engine = toy_engine(toy)
    batch = {name: value[:3] for name, value in toy.batches(1)[0][0].items()}
    with pytest.raises(BatchError, match="has 3 samples, the plan needs 4"):
        engine.forward_backward(batch)
    assert all(p.grad is None for p in engine.parameters())


def test_another_signature_compiles_another_program_once():
    toy = Toy()
    compiled = []

    def compile_toy():
        compiled.append(1)
        return toy.program()

    engine = toy_engine(toy, compile_toy=compile_toy)
    ((batch,),) = toy.batches(1)
    engine.forward_backward(batch)
    assert compiled == []
    with pytest.raises(BatchError, match="the program takes"):  # the toy knows one shape only
        engine.forward_backward({**batch, "x": batch["x"].repeat(1, 2)})
    assert compiled == [1]
    engine.forward_backward(batch)
    assert engine.stats()["programs"] == 2


def test_a_model_on_meta_needs_values_before_its_first_step():
    engine = toy_engine(Toy(), tensors=meta_values())
    ((batch,),) = Toy().batches(1)
    with pytest.raises(AutoshardError, match=r"2 parameters have no values yet, 'a\.weight'"):
        engine.forward_backward(batch)
    engine.load_full_state_dict(Toy().values())
    expected = reference_loss(Toy().values(), [batch])
    assert torch.allclose(engine.forward_backward(batch), expected, rtol=1e-12)


def test_init_fills_whole_tensors_by_name_whatever_the_seed_outside():
    seen = []

    def init(name, tensor):
        seen.append((name, tuple(tensor.shape)))
        tensor.normal_()

    state = torch.get_rng_state()
    first = toy_engine(Toy(), tensors=meta_values(), init=init).full_state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert seen == [("a.weight", (4, 3)), ("b.weight", (5, 4))]
    again = toy_engine(Toy(), tensors=meta_values(), init=init).full_state_dict()
    assert all(torch.equal(first[n], again[n]) for n in first)


def test_loading_is_strict_and_views_stay_valid():
    engine = toy_engine(Toy())
    parameter = dict(engine.named_parameters())["a.weight"]
    with pytest.raises(CheckpointError, match="1 missing, 1 unexpected"):
        engine.load_full_state_dict({"a.weight": torch.zeros(4, 3), "c": torch.zeros(1)})
    engine.load_full_state_dict({n: 3 * v for n, v in Toy().values().items()})
    assert torch.equal(parameter, 3 * Toy().values()["a.weight"])


def test_stats_report_and_graph_say_what_runs():
    toy = Toy(m=2)
    engine = toy_engine(toy)
    engine.forward_backward(toy.batches(1)[0][0])
    stats = engine.stats()
    assert stats["steps"] == 1 and stats["samples_per_second"] > 0
    assert stats["stored_bytes"] == 32 * 8
    text = str(engine.report())
    assert "1f1b, 2 micro-batches" in text and "train: t float64[2, 5], x float64[2, 3]" in text
    assert "tanh" in engine.graph("pipeline").code
    assert (engine.dp_rank, engine.dp_size, engine.mesh.world_size) == (0, 1, 1)


def test_the_report_puts_measured_memory_beside_predicted():
    toy = Toy(m=2)
    engine = toy_engine(toy)
    (batch,) = toy.batches(1)[0]
    optimizer = torch.optim.AdamW(engine.parameters())
    engine.forward_backward(batch)
    optimizer.step()
    engine.zero_grad()
    assert "measured" not in str(engine.report()) and "peak_bytes" not in engine.stats()
    with engine.measure_memory():
        engine.forward_backward(batch)
    lines = str(engine.report()).splitlines()
    moments = next(line for line in lines if "optimizer" in line)
    assert moments.split() == ["optimizer", "512", "B", "520", "B", "measured,", "-8", "B"]
    assert engine.stats()["peak_bytes"] > 3 * engine.stats()["stored_bytes"]


def test_one_rank_takes_any_optimizer():
    engine = toy_engine(Toy())
    engine.forward_backward(Toy().batches(1)[0][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.Adafactor(engine.parameters()).step()
