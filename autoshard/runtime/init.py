"""First values of parameters and buffers: the model's own, or those of an init function."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from autoshard.diagnostics import CaptureError
from autoshard.ir.params import ParamSpec
from autoshard.ir.program import Program
from autoshard.runtime.batch import hash_text, hash_values
from autoshard.runtime.control import Control
from autoshard.runtime.storage import Storage

Init = Callable[[str, torch.Tensor], object]  # fills the tensor of that name in place


def check_init(program: Program, tensors: Mapping[str, torch.Tensor], init: Init | None) -> None:
    """Refuse a buffer that nothing can give a value: on the meta device, not in state dicts."""
    lost = [
        spec.fqn
        for spec in program.params
        if spec.is_buffer and not spec.persistent and _is_meta(tensors.get(spec.fqn))
    ]
    if lost and init is None:
        raise CaptureError(
            f"buffer '{lost[0]}' is on the meta device and no state dict holds it",
            help="give parallelize(init=): a function (name, tensor) that fills tensors in place",
        )


def fill(
    program: Program,
    storage: Storage,
    tensors: Mapping[str, torch.Tensor],
    init: Init | None,
    control: Control,
    seed: int,
) -> set[str]:
    """Write first values to ``storage`` and return the names that are still without one.

    Values of a real model are rank 0's wherever ranks differ, so that replicas start alike.
    """
    real = {s.fqn: tensors[s.fqn] for s in program.params if _is_real(tensors.get(s.fqn))}
    is_alike = len({row[0] for row in control.gather([hash_values(real)])}) == 1
    missing: set[str] = set()
    for spec in program.params:
        if spec.fqn in real:
            value = real[spec.fqn].detach()
            if not is_alike:
                value = control.broadcast(value.cpu().clone())
            storage.write(spec.fqn, value)
        elif spec.fqn in tensors and init is not None:
            _write_initial(storage, spec, init, seed)
        elif spec.fqn in tensors:
            missing.add(spec.fqn)
    return missing


def _write_initial(storage: Storage, spec: ParamSpec, init: Init, seed: int) -> None:
    """Make one whole tensor, from random numbers of its own, and keep this rank's part."""
    is_kept = spec.fqn in storage.layout.slots or spec.is_buffer or not spec.homes
    if not is_kept:
        return
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(hash_text(f"{seed} {spec.fqn}"))
        value = torch.empty(spec.shape, dtype=spec.dtype)
        init(spec.fqn, value)
    storage.write(spec.fqn, value)


def _is_meta(value: torch.Tensor | None) -> bool:
    return value is not None and value.is_meta


def _is_real(value: torch.Tensor | None) -> bool:
    return value is not None and not value.is_meta
