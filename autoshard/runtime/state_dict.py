"""The whole state dict under the model's own names, gathered from and dealt out to the ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher

import torch

from autoshard.diagnostics import CheckpointError
from autoshard.ir.params import ParamSpec, ParamTable
from autoshard.ir.placement import Shard, join_shards
from autoshard.ir.program import Program
from autoshard.runtime.comm import Transport
from autoshard.runtime.control import Control
from autoshard.runtime.layout import Slot, bucket_stages, plan_layout, scheduled
from autoshard.runtime.storage import Storage, view
from autoshard.runtime.work import Transfer

StateDict = Mapping[str, torch.Tensor]
METADATA = "autoshard"  # our key in the state dict's `_metadata`


def gather_state(
    program: Program, storage: Storage, comm: Transport, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return ``names`` -> values as in the plain model on rank 0, nothing on the others.

    Tied names share one tensor; padding is gone. Every rank must call it.
    """
    is_first = all(comm.index(axis) == 0 for axis in ("pp", "dp", "tp"))
    values: dict[str, torch.Tensor] = {}
    layout = plan_layout(program, range(len(program.stages)))
    for bucket in layout.buckets:
        values |= _gather_bucket(program, storage, comm, bucket, layout.slots_of(bucket))
    if not is_first:
        return {}
    values |= {name: buffer.cpu().clone() for name, buffer in storage.buffers.items()}
    state = OrderedDict((name, values[program.params[name].fqn]) for name in names)
    if storage.scaler is not None:
        # As torch keeps versions of modules: names stay those of the model.
        state._metadata = {METADATA: storage.scaler.state()}  # type: ignore[attr-defined]
    return state


def _gather_bucket(
    program: Program, storage: Storage, comm: Transport, bucket: str, slots: Sequence[Slot]
) -> dict[str, torch.Tensor]:
    info = next(b for b in _all_buckets(program) if b.name == bucket)
    holder = scheduled(program).stage_to_rank[bucket_stages(info)[0]]
    flat = None
    if comm.index("pp") == holder:
        flat = storage.stored[bucket].to(storage.device)
        if info.axis is not None:
            flat = comm.all_gather_start(flat, info.axis).wait().view(-1)
    if comm.index("dp") != 0:
        return {}
    values = {}
    for slot in slots:
        whole = None if flat is None else _over_axes(view(flat, slot), slot.spec, comm)
        if comm.index("tp") == 0:
            whole = _to_first(whole, slot.spec, holder, comm)
            if whole is not None:
                values[slot.spec.fqn] = slot.spec.unpad(whole).cpu().clone()
    return values


def _all_buckets(program: Program) -> Iterable:
    return plan_layout(program, range(len(program.stages))).buckets.values()


def _over_axes(local: torch.Tensor, spec: ParamSpec, comm: Transport) -> torch.Tensor:
    for axis, placement in spec.placements.items():
        if isinstance(placement, Shard):
            parts = comm.all_gather_start(local.contiguous(), axis).wait()
            local = join_shards(parts.unbind(0), placement)
    return local


def _to_first(
    value: torch.Tensor | None, spec: ParamSpec, holder: int, comm: Transport
) -> torch.Tensor | None:
    """Move a value from the stage that holds it to the first pipeline rank."""
    me = comm.index("pp")
    if holder == 0:
        return value if me == 0 else None
    if value is not None:
        comm.transfer_start([Transfer(True, value.contiguous(), "pp", 0, 0)])[0].wait()
    if me != 0:
        return None
    buffer = torch.empty(spec.whole_shape, dtype=spec.dtype, device=comm.device)
    return comm.transfer_start([Transfer(False, buffer, "pp", holder, 0)])[0].wait()


def load_state(
    program: Program, storage: Storage, control: Control, names: Sequence[str], state: StateDict
) -> None:
    """Write ``state`` to the ranks' storage: each rank's own dict if all have one, else rank 0's.

    Raises CheckpointError, on all ranks and before anything is written, when it doesn't fit.
    """
    given = [bool(row[0]) for row in control.gather([bool(state)])]
    is_shared = not all(given)

    def check() -> None:
        if control.rank == 0 or not is_shared:
            check_state(program.params, names, state)

    control.together(check)
    done: set[str] = set()
    for name in names:
        spec = program.params[name]
        if spec.fqn in done:
            continue
        done.add(spec.fqn)
        if is_shared:
            value = state[name] if control.rank == 0 else torch.empty(spec.shape)
            value = control.broadcast(value.detach().cpu().to(spec.dtype))
        else:
            value = state[name]
        storage.write(spec.fqn, value)
    _load_scale(storage, control, state)


def _load_scale(storage: Storage, control: Control, state: StateDict) -> None:
    """Take over the loss scale that rank 0's dict holds; one without it leaves ours."""
    if storage.scaler is None:
        return
    own = storage.scaler.state()
    given = getattr(state, "_metadata", {}).get(METADATA, own)
    numbers = torch.tensor([given[name] for name in own], dtype=torch.float64)
    storage.scaler.load(dict(zip(own, control.broadcast(numbers).tolist(), strict=True)))


def check_state(table: ParamTable, names: Sequence[str], state: StateDict) -> None:
    """Raise one CheckpointError that lists all that doesn't fit: names, renames, shapes, ties."""
    missing = [name for name in names if name not in state]
    unexpected = [name for name in state if name not in set(names)]
    lines = [f"missing: '{name}' {list(table[name].shape)}" for name in missing]
    lines += [f"unexpected: '{name}' {list(state[name].shape)}" for name in unexpected]
    lines += _renamed(table, missing, {name: state[name] for name in unexpected})
    for name in names:
        if name in state and tuple(state[name].shape) != table[name].shape:
            want, have = list(table[name].shape), list(state[name].shape)
            lines.append(f"shape: '{name}' is {have} in the state dict, {want} in the model")
    lines += _untied(table, names, state)
    if lines:
        raise CheckpointError(
            f"the state dict doesn't fit the model: {len(missing)} missing,"
            f" {len(unexpected)} unexpected; nothing was loaded",
            notes=lines,
        )


def _renamed(table: ParamTable, missing: Sequence[str], others: StateDict) -> list[str]:
    """Return a line for each missing name that an unexpected one of its shape resembles."""
    lines = []
    for name in missing:
        alike = [other for other, v in others.items() if tuple(v.shape) == table[name].shape]
        scored = [(SequenceMatcher(None, name, other).ratio(), other) for other in alike]
        best = max(scored, default=(0.0, ""))
        if best[0] > 0.6:
            lines.append(f"renamed? '{best[1]}' has the shape of '{name}'")
    return lines


def _untied(table: ParamTable, names: Sequence[str], state: StateDict) -> list[str]:
    """Return a line for each tied parameter whose names hold different values."""
    lines = []
    for name in names:
        home = table[name].fqn
        if name == home or name not in state or home not in state:
            continue
        first, second = state[home], state[name]
        if first.shape == second.shape and not torch.equal(first, second):
            lines.append(f"tied: '{name}' and '{home}' are one parameter but hold different values")
    return lines
