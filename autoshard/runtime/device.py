"""Copies from the host to the device that a rank computes on."""

from __future__ import annotations

import torch


def to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``value`` on ``device``; the host does not wait for a copy to a CUDA device.

    The copy goes through pinned memory, which torch keeps until the device has read it. Pageable
    memory would make the host wait for all that the device has been given before.
    """
    if device.type != "cuda" or value.device.type != "cpu":
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)
