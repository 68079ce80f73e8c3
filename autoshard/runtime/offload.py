"""Buckets in pinned host memory: the optimizer works there, copies run beside the computation.

What is stored is on the host; phases read copies on the device, which are made anew in each step.
Copies go over a stream of their own, which waits for the computation that was launched before, and
for which the computation waits where it reads. The idea is ZeRO-Offload's (Ren et al. 2021).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class HostMemory:
    """The host's side of one rank's buckets, and the copies to and from its device."""

    def __init__(self, device: torch.device) -> None:
        """Copy to and from ``device``; with one that is no CUDA device copies are done at once."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copies: dict[str, torch.Tensor] = {}  # on the device, by bucket
        self._arriving: dict[str, torch.cuda.Event] = {}

    @property
    def copies(self) -> Mapping[str, torch.Tensor]:
        """Return the buckets that ``send`` has copied, on the device."""
        return self._copies

    def zeros(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in host memory that the device can copy from while the host goes on."""
        return torch.zeros(length, dtype=dtype, pin_memory=self._stream is not None)

    def send(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Start to copy buckets to the device, in order; call it once their values are settled."""
        for name, value in stored.items():
            if name not in self._copies:
                self._copies[name] = torch.empty_like(value, device=self._device, pin_memory=False)
        self._follow()
        with torch.cuda.stream(self._stream):
            for name, value in stored.items():
                self._copies[name].copy_(value, non_blocking=True)
                if self._stream is not None:
                    self._arriving[name] = self._stream.record_event()

    def copy_of(self, name: str) -> torch.Tensor:
        """Return a bucket on the device; what is launched from now on waits until it is there."""
        arrived = self._arriving.pop(name, None)
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        return self._copies[name]

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        """Start to copy pinned host memory to the device and return the copy.

        Only what waits for the stream of copies may read it: see ``stream``.
        """
        # Made on the computing stream, so that its memory goes back to where it came from.
        part = torch.empty_like(value, device=self._device, pin_memory=False)
        self._follow()
        with torch.cuda.stream(self._stream):
            return part.copy_(value, non_blocking=True)

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """Start to copy a device value to pinned host memory; read it after ``settle``."""
        self._follow()
        with torch.cuda.stream(self._stream):
            host = torch.empty_like(value, device="cpu", pin_memory=self._stream is not None)
            host.copy_(value, non_blocking=True)
        if self._stream is not None:
            value.record_stream(self._stream)
        return host

    def settle(self) -> None:
        """Block the host until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def stream(self) -> torch.cuda.StreamContext:
        """Return the context in which what is launched waits for copies, not for computation."""
        return torch.cuda.stream(self._stream)

    def _follow(self) -> None:
        """Let copies wait for what was launched so far: it may still use the memory they take."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
