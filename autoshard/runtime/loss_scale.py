"""Scale the loss so that half-precision gradients don't vanish; skip what overflows, everywhere.

As Micikevicius et al. (2018) and torch's GradScaler: the scale is halved after an overflow and
doubled after a while without. All ranks see one flag, so that they skip together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from autoshard.ir.precision import Precision
from autoshard.ops.communicator import Communicator

GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000  # calls of forward_backward without overflow
SMALLEST = 2.0**-14
DROPPED_IN_A_ROW = 20  # calls without an optimizer step before somebody is told


class LossScaler:
    """The scale of one rank; equal on all ranks, for all of them are told the same."""

    def __init__(self, scale: float, is_dynamic: bool) -> None:
        """Start with ``scale``; a static one never changes."""
        self.scale, self.is_dynamic = scale, is_dynamic
        self.good_calls = 0  # since the scale last changed
        self.skipped = 0  # overflows since the start
        self._dropped = 0  # calls since an overflow whose gradients were dropped, it included

    @classmethod
    def of(cls, precision: Precision | None) -> LossScaler | None:
        """Return the scaler of a program, None where nothing is scaled."""
        if precision is None or precision.loss_scale is None:
            return None
        return cls(precision.loss_scale, precision.is_dynamic)

    def keeps(
        self, gradients: Iterable[torch.Tensor], comm: Communicator, device: torch.device
    ) -> bool:
        """Tell whether the gradients may be used, the same on all ranks; adapt the scale.

        After an overflow nothing is kept until the optimizer's next step: rounds of accumulation
        belong together.
        """
        flag = torch.zeros((), device=device)
        for grad in gradients:
            flag = torch.maximum(flag, grad.isfinite().logical_not().any().to(flag.dtype))
        for axis in ("dp", "tp", "pp"):
            flag = comm.all_reduce_start(flag, axis, "max").wait()
        overflowed = bool(flag)
        self._adapt(overflowed)
        if overflowed or self._dropped:
            self._drop()
        return not self._dropped

    def stepped(self) -> None:
        """Note that an optimizer has made its step, or gradients were dropped by the user."""
        self._dropped = 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint must hold."""
        return {"loss_scale": self.scale, "good_calls": self.good_calls}

    def load(self, state: dict[str, float]) -> None:
        """Go on from what ``state`` gave."""
        self.scale, self.good_calls = float(state["loss_scale"]), int(state["good_calls"])

    def _adapt(self, overflowed: bool) -> None:
        self.skipped += overflowed
        self.good_calls = 0 if overflowed else self.good_calls + 1
        if not self.is_dynamic:
            return
        if overflowed:
            self.scale = max(self.scale * BACKOFF, SMALLEST)
        elif self.good_calls == GROWTH_INTERVAL:
            self.scale, self.good_calls = self.scale * GROWTH, 0

    def _drop(self) -> None:
        self._dropped += 1
        if self._dropped == DROPPED_IN_A_ROW:
            warnings.warn(
                f"the gradients of {self._dropped} calls were dropped since one overflowed:"
                " they belong to one optimizer.step(), which did not come",
                stacklevel=2,
            )
