"""The most bytes that a rank has at once: what they are for, and when.

`cost.replay` predicts it from the program, `runtime.ledger` measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PARAMETERS = "parameters"  # as stored, buffers too
GRADIENTS = "gradients"  # sums over micro-batches, and what the optimizer will read
OPTIMIZER = "optimizer"  # masters that aren't the parameters themselves, and moments
ACTIVATIONS = "activations"  # kept for backward, and inside the phase that is running
GATHERED = "gathered"  # buckets while they are whole
COMMUNICATION = "communication"  # buffers of reductions, and messages
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, GATHERED, COMMUNICATION)
HOST = "host"  # offloaded buckets, their moments and gradients: in host memory, in no sum of these


@dataclass(frozen=True)
class Peak:
    """A moment: bytes by category, the action that was being carried out, and its node.

    Two are of other moments, the most that there was at any: ``host``, what offloading held in host
    memory, in no sum of the others, and ``gathered``, buckets that were whole.
    """

    sizes: Mapping[str, int]
    action: str = ""
    node: str = ""
    host: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        """Return all bytes on the device."""
        return sum(self.sizes.values())

    @property
    def place(self) -> str:
        """Return when it was: "0F3: gelu of h.1.mlp"."""
        return f"{self.action}: {self.node}" if self.action else self.node or "between steps"
