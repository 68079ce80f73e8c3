"""Train a Program on N virtual ranks in one process: the same code, storage and executor as real.

Only the communicator differs (`testing.rendezvous`). What comes back is global: every gradient and
parameter put together from the ranks that hold it, after a check that replicas agree bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from autoshard.runtime.batch import split_leaves
from autoshard.runtime.clip import clip_grad_norm
from autoshard.runtime.codegen import generate
from autoshard.runtime.executor import Executable
from autoshard.runtime.inductor import inductor_for
from autoshard.runtime.link import link
from autoshard.runtime.phases import Code, generate_code
from autoshard.testing.assemble import agreed, assemble
from autoshard.testing.rendezvous import CPU, Hub, Rendezvous

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
Leaves = Mapping[str, torch.Tensor]


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of equivalence tests; its epsilon keeps near-zero gradients tame."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, weight_decay=0.1)


@dataclass(frozen=True)
class StepRecord:
    """What one step computed, by canonical name and in the model's global shapes."""

    loss: torch.Tensor
    grads: Mapping[str, torch.Tensor]  # before clipping
    norm: torch.Tensor | None  # None without clipping
    params: Mapping[str, torch.Tensor]  # after the optimizer's step


@dataclass
class _RankRecord:
    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    params: list[dict[str, torch.Tensor]] = field(default_factory=list)


def run_lockstep(
    program: Program,
    values: Mapping[str, torch.Tensor],
    batches: Sequence[Sequence[Leaves]],
    *,
    optimizer: MakeOptimizer | None = adamw,
    max_norm: float | None = None,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    code: Code | None = None,
    device: torch.device = CPU,
) -> tuple[StepRecord, ...]:
    """Train ``len(batches)`` steps and return what each computed.

    ``values`` are the model's parameters and buffers by canonical name, whole. ``batches[step][d]``
    are the leaves of the local batch of data parallel rank ``d``. Without ``optimizer`` gradients
    add up from step to step, as rounds of accumulation with ``weights``. ``code`` is that of a
    program with the same graphs, if there is one already. Ranks compute on ``device``. Raises the
    first error of any rank; ranks that disagree, or a deadlock, are a RuntimeMismatchError.
    """
    weights = weights or [1.0] * len(batches)

    def train(exe: Executable) -> _RankRecord:
        record = _RankRecord()
        parameters = exe.storage.parameters
        stepper = optimizer(parameters.values()) if optimizer and parameters else None
        for index, batch in enumerate(batches):
            leaves = {n: t.to(device) for n, t in batch[exe.comm.index("dp")].items()}
            parts = split_leaves(leaves, program.leaves, program.num_microbatches)
            loss = exe.step(parts, weights[index], seed=seed, index=index)
            record.losses.append(loss)
            record.grads.append(_copy_grads(exe))
            if max_norm is not None:
                record.norms.append(clip_grad_norm(exe.storage, exe.comm, max_norm))
            if stepper is not None:
                stepper.step()
                exe.storage.stepped()
            if optimizer is not None:
                _zero_grad(parameters.values())
            record.params.append({n: p.detach().clone() for n, p in parameters.items()})
        return record

    executables, records = run_ranks(program, values, train, code, device)
    return tuple(_join(i, executables, records, max_norm) for i in range(len(batches)))


def run_ranks(
    program: Program,
    values: Mapping[str, torch.Tensor],
    body: Callable[[Executable], object],
    code: Code | None = None,
    device: torch.device = CPU,
) -> tuple[list[Executable], list]:
    """Link ``program`` for every virtual rank, run ``body`` on each in lock step; return both."""
    inductor = inductor_for(program, device)
    code = code or generate_code(program, inductor=inductor)
    prelude = (
        generate(program.prelude, "prelude", program.kernels)
        if program.prelude is not None
        else None
    )

    def one(comm: Rendezvous) -> tuple[Executable, object]:
        exe = link(program, comm, code=code, prelude=prelude)
        for name, value in values.items():
            exe.storage.write(name, value)
        return exe, body(exe)

    pairs = run_virtual(program.mesh, one, device)
    return [exe for exe, _ in pairs], [result for _, result in pairs]


def run_virtual(
    mesh: Mesh, body: Callable[[Rendezvous], object], device: torch.device = CPU
) -> list:
    """Run ``body`` on every rank of ``mesh``, one thread each; return the results by rank."""
    hub = Hub(mesh, device)
    results: list[object] = [None] * mesh.world_size

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            hub.enter(rank)
            results[rank] = body(Rendezvous(hub, rank))
        except BaseException as error:
            hub.leave(rank, error)
        else:
            hub.leave(rank)

    threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if hub.failure is not None:
        raise hub.failure
    hub.check_empty()
    return results


def _copy_grads(exe: Executable) -> dict[str, torch.Tensor]:
    parameters = exe.storage.parameters.items()
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def _zero_grad(parameters: Iterable[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _join(
    step: int,
    executables: Sequence[Executable],
    records: Sequence[_RankRecord],
    max_norm: float | None,
) -> StepRecord:
    losses = [record.losses[step] for record in records]
    norms = [record.norms[step] for record in records] if max_norm is not None else None
    return StepRecord(
        loss=agreed(dict(enumerate(losses)), "loss"),
        grads=assemble(executables, [record.grads[step] for record in records]),
        norm=None if norms is None else agreed(dict(enumerate(norms)), "gradient norm"),
        params=assemble(executables, [record.params[step] for record in records]),
    )
