"""The device that a rank computes on: copies to it, and what its allocator counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Allocator:
    """The most bytes that torch's CUDA allocator had given out, and had taken from the device.

    Both include what no tensor of the engine holds: kernels' workspaces, the rounding of sizes,
    and whatever else the process keeps on the device.
    """

    allocated: int
    reserved: int


def watch_allocator(device: torch.device) -> Callable[[], Allocator | None]:
    """Reset the allocator's peaks and return what reads them; it gives None on a CPU."""
    if device.type != "cuda":
        return lambda: None
    torch.cuda.reset_peak_memory_stats(device)
    peak, reserved = torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved
    return lambda: Allocator(peak(device), reserved(device))


def to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``value`` on ``device``; the host does not wait for a copy to a CUDA device.

    The copy goes through pinned memory, which torch keeps until the device has read it. Pageable
    memory would make the host wait for all that the device has been given before.
    """
    if device.type != "cuda" or value.device.type != "cpu":
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)
