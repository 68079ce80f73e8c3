"""The number types of a step: what a plan's `precision` block means for one program."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = (torch.bfloat16, torch.float16)
INITIAL_SCALE = 2.0**16


@dataclass(frozen=True)
class Precision:
    """Number types by their use; absent from a program that computes as its model does."""

    params: torch.dtype  # parameters as phases read them
    compute: torch.dtype  # what layers compute in
    grads: torch.dtype  # sums of gradients over micro-batches
    reduce: torch.dtype  # gradients on their way between ranks
    master: torch.dtype  # what is stored, handed to the optimizer and saved
    loss_scale: float | None = None  # the first one where it is dynamic
    is_dynamic: bool = False

    @property
    def bytes_per_parameter(self) -> int:
        """Return what parameter, gradient, master and two Adam states cost, nothing cut.

        16 as the ZeRO paper counts them, 18 with gradients summed in float32.
        """
        copy = 0 if self.params == self.master else self.params.itemsize
        return copy + self.grads.itemsize + 3 * self.master.itemsize


def parse_scale(setting: float | str | None) -> tuple[float | None, bool]:
    """Return the first loss scale and whether it adapts.

    >>> parse_scale("dynamic")
    (65536.0, True)
    """
    if setting is None:
        return None, False
    return (INITIAL_SCALE, True) if setting == "dynamic" else (float(setting), False)
