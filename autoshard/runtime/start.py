"""From torchrun's variables to connected ranks; nothing starts before the plan is known to fit."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from autoshard.diagnostics import MeshError
from autoshard.mesh import Mesh
from autoshard.runtime.control import Control
from autoshard.source import Span

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_world() -> int | None:
    """Return the number of processes of the job, None when nothing launched several."""
    if dist.is_initialized():
        return dist.get_world_size()
    if all(name in os.environ for name in VARIABLES):
        return int(os.environ["WORLD_SIZE"])
    return None


def require_processes(mesh: Mesh, world: int | None, span: Span | None = None) -> None:
    """Refuse a mesh that has not exactly one place for each process."""
    if mesh.world_size == (world or 1):
        return
    need = mesh.world_size
    if world is None:
        raise MeshError(
            f"this plan needs {need} processes: torchrun --nproc-per-node {need} train.py",
            code="AS302",
            span=span,
            label=str(mesh),
            help="this process was started alone, without torchrun",
        )
    raise MeshError(
        f"the mesh has {need} places but {world} processes were started",
        code="AS302",
        span=span,
        label=str(mesh),
        help=f"start {need} processes",
    )


def choose_device(leaves: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the device to train on: the kind of device that the example batch lies on.

    On CUDA each local rank has a device of its own; more ranks than devices are refused.
    """
    kinds = {value.device.type for value in leaves.values()}
    if "cuda" not in kinds:
        return torch.device("cpu")
    local, here = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    started = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if started > here:
        raise MeshError(
            f"{started} processes were started on a machine with {here} CUDA devices",
            help=f"start at most {here} processes a machine, or train on the CPU (gloo)",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def connect(device: torch.device) -> Control:
    """Join the other ranks, in the process group that exists or in one started here."""
    if not dist.is_initialized():
        if launched_world() in (None, 1):
            return Control()
        _start(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return Control()
    is_gloo = dist.get_backend() == "gloo"
    group = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo")
    return Control(rank, world, group)


def _start(device: torch.device) -> None:
    """Start the default group; a restarted job must not meet addresses of its former life."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store, rank, world = next(iter(rendezvous("env://")))
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"autoshard/{life}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    atexit.register(_stop)


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
