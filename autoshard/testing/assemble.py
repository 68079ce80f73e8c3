"""Put global tensors together from what the ranks hold, and check that replicas agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autoshard.diagnostics import VerifyError
from autoshard.ir.placement import Shard, join_shards
from autoshard.mesh import Mesh
from autoshard.runtime.executor import Executable
from autoshard.runtime.storage import Storage

Parts = Mapping[str, torch.Tensor]  # what one rank holds, by canonical name


def assemble(executables: Sequence[Executable], parts: Sequence[Parts]) -> dict[str, torch.Tensor]:
    """Return the global value of every parameter that any rank has a part of.

    ``parts[rank]`` are laid out as the handed-out parameters are. Raises VerifyError when two
    ranks that should hold the same hold something else.
    """
    mesh = executables[0].program.mesh
    names = dict.fromkeys(name for held in parts for name in held)
    return {name: _global(name, mesh, [e.storage for e in executables], parts) for name in names}


def _global(
    name: str, mesh: Mesh, storages: Sequence[Storage], parts: Sequence[Parts]
) -> torch.Tensor:
    whole: dict[int, torch.Tensor] = {}
    for rank in range(mesh.world_size):
        if name in parts[rank]:
            local = _local(name, mesh, rank, storages, parts)
            whole[rank] = _over_axes(name, mesh, rank, storages, parts, local)
    value = agreed(whole, f"'{name}'")
    holder = next(iter(whole))
    spec = storages[holder].layout.slots[name].spec
    own = spec.unpad(value)
    if not torch.equal(spec.pad(own), value):
        kept = f"ranks that keep the same head of '{name}' hold different values"
        raise VerifyError(kept if spec.copies else f"the padding of '{name}' is not zero")
    return own


def _local(
    name: str, mesh: Mesh, rank: int, storages: Sequence[Storage], parts: Sequence[Parts]
) -> torch.Tensor:
    """Return the local parameter of one rank, its shards joined."""
    layout = storages[rank].layout
    slot = layout.slots[name]
    axis = layout.buckets[slot.bucket].axis
    if axis is None:
        return parts[rank][name]
    flat = torch.cat([parts[peer][name] for peer in mesh.group(rank, axis)])
    return flat.view(slot.shape)


def _over_axes(
    name: str,
    mesh: Mesh,
    rank: int,
    storages: Sequence[Storage],
    parts: Sequence[Parts],
    local: torch.Tensor,
) -> torch.Tensor:
    """Return the global value of one rank's local one; at most one axis cuts a parameter."""
    spec = storages[rank].layout.slots[name].spec
    cuts = [(a, p) for a, p in spec.placements.items() if isinstance(p, Shard)]
    for axis, placement in cuts:
        peers = mesh.group(rank, axis)
        locals_ = [_local(name, mesh, peer, storages, parts) for peer in peers]
        local = join_shards(locals_, placement)
    return local


def agreed(values: Mapping[int, torch.Tensor], what: str) -> torch.Tensor:
    """Return the value that all ranks hold; raise VerifyError naming two that differ."""
    (first, reference), *others = values.items()
    for rank, value in others:
        same = torch.equal(torch.nan_to_num(value), torch.nan_to_num(reference))
        if not same:
            gap = (value - reference).abs().max().item()
            raise VerifyError(f"ranks {first} and {rank} hold different {what}: up to {gap:.3g}")
    return reference
