"""Z5, Z7 and their kind: parameters that are frozen, unused, empty, scalar, or read elsewhere."""

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from autoshard.frontend import compile_plan
from autoshard.ir.graph_function import GRAD
from autoshard.ir.program import Program
from autoshard.runtime.executor import Executable
from autoshard.testing.assemble import assemble
from autoshard.testing.equivalence import held_values
from autoshard.testing.lockstep import run_ranks
from autoshard.testing.models import Built, tiny_hf
from autoshard.testing.mutants import named
from tests.bank.equal import assert_equal, finding, read
from tests.bank.odd import SAMPLES, odd

PLAN = """
mesh {{ dp = 2 }}
batch {{ micro_batch_size = 1, num_microbatches = 2 }}
zero {{ stage = {stage}, param_persistence_threshold = 0KiB }}
"""
STAGES = """
mesh {{ pp = 3 }}
batch {{ micro_batch_size = 1, num_microbatches = 4 }}
pipeline {{ split = before(blocks.0, blocks.2), schedule = {schedule} }}
"""
KINDS = ("elsewhere", "frozen", "scalar", "empty", "turned", "unused")
FROZEN = {"blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias", "blocks.2.bias"}


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_in_one_process(kind: str, stage: int) -> None:
    found = assert_equal(odd(kind), PLAN.format(stage=stage))
    model = odd(kind)[0]
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    left_out = {"unused": {"extra"}, "elsewhere": {"head.weight"}}.get(kind, set())
    assert set(found.ours[-1].grads) == trained - left_out


def lose_a_use(program: Program) -> bool:
    """Forget the gradient of one of two uses of the embedding's weight."""
    function = program.stages[0].phases["I"]
    grad = function.named_results(GRAD)["emb.weight"]
    assert grad.target is torch.ops.aten.add.Tensor
    results = [grad.args[0] if node is grad else node for node in function.results]
    function.set_outputs(results, function.outputs)
    return True


def test_a_use_elsewhere_that_does_not_count_is_seen() -> None:
    assert finding(odd("elsewhere"), PLAN.format(stage=1), lose_a_use) == "grad emb.weight"


@pytest.mark.parametrize("kind", ("frozen", "scalar"))
def test_a_parameter_read_from_anothers_bucket_is_seen(kind: str) -> None:
    assert finding(odd(kind), PLAN.format(stage=3), named("read-another-bucket").plant) == "loss"


def on_ranks(built: Built, body: Callable[[Executable], object]) -> tuple[list, list]:
    """Run ``body`` on both ranks of a program under ZeRO 3, in float64."""
    model, batch, loss = built
    program = compile_plan(model, read(PLAN.format(stage=3)), batch, loss, dtype=torch.float64)
    values = held_values(model, program.program, torch.float64)
    return run_ranks(program.program, values, body)


def step(exe: Executable, optimizer: torch.optim.Optimizer, batch: dict) -> None:
    rows = SAMPLES // 2
    first = exe.comm.index("dp") * rows
    local = [{n: v[first + i : first + i + 1] for n, v in batch.items()} for i in range(rows)]
    exe.step(local)
    optimizer.step()


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state() -> None:
    built = odd("frozen")

    def train(exe: Executable) -> tuple[set[str], set[str]]:
        held = exe.storage.parameters
        optimizer = torch.optim.AdamW(held.values())
        step(exe, optimizer, built[1])
        with_state = {name for name, p in held.items() if p in optimizer.state}
        return with_state, {name for name, p in held.items() if p.grad is not None}

    for with_state, with_grad in on_ranks(built, train)[1]:
        assert with_state == with_grad and with_state
        assert not FROZEN & with_state and {n for n, _ in built[0].named_parameters()} >= FROZEN


@pytest.mark.parametrize(("schedule", "is_first_frozen"), [("1f1b", False), ("zb_h2", True)])
def test_a_stage_that_trains_nothing_takes_its_part(schedule: str, is_first_frozen: bool) -> None:
    """The middle stage only hands gradients on, or gets none to hand on; the norm is one."""
    built = odd("frozen")
    built[0].emb.requires_grad_(not is_first_frozen)
    found = assert_equal(built, STAGES.format(schedule=schedule))
    trained = {n for n, p in built[0].named_parameters() if p.requires_grad}
    assert set(found.ours[-1].grads) == trained
    assert trained == {"blocks.2.weight", "blocks.3.weight", "blocks.3.bias", "head.weight"} | (
        set() if is_first_frozen else {"emb.weight"}
    )


def adamw_in_groups(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """Return AdamW that decays weights only, as names tell: shards have lost their shapes."""
    held = list(parameters)
    decayed = [p for name, p in held if name.endswith("weight")]
    others = [p for name, p in held if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)


@pytest.mark.parametrize("swap", (False, True))
def test_parameter_groups_by_name_are_kept(swap: bool) -> None:
    model, batch, loss = built = odd("scalar")

    def train(exe: Executable) -> dict[str, torch.Tensor]:
        held = list(exe.storage.parameters.items())
        if swap:  # the fault: the same parameters, each under the next one's name
            names = [name for name, _ in held]
            held = [(n, p) for n, (_, p) in zip(names[1:] + names[:1], held, strict=True)]
        step(exe, adamw_in_groups(held), batch)
        return {name: p.detach() for name, p in exe.storage.parameters.items()}

    ours = assemble(*on_ranks(built, train))
    plain = copy.deepcopy(model).double()
    loss(plain(batch["ids"]), batch).backward()
    adamw_in_groups(plain.named_parameters()).step()
    worst = max((ours[n] - p).abs().max() for n, p in plain.named_parameters())
    assert (worst < 1e-12) != swap


@pytest.mark.parametrize("stage", (1, 3))
def test_adapters_of_peft_are_trained_and_nothing_else(stage: int) -> None:
    peft = pytest.importorskip("peft")
    model, batch, loss = tiny_hf("llama", layers=1, heads=4, length=6)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).train()
    found = assert_equal((adapted, batch, loss), PLAN.format(stage=stage))
    assert len(found.ours[0].grads) == 4 and all("lora_" in name for name in found.ours[0].grads)
