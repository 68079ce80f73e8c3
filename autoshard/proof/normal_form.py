"""How each operator reads as a term once communication, casts and layout are erased.

Erased: collectives, casts between types that hold the value, copies, views. Renamed: an addmm is a
product and an addition, a mean a sum and a factor, a fused add and norm an addition and a norm, the
operators over a split vocabulary are those over a whole one. Sizes among the arguments are replaced
by the global shapes that the placements give: which local block is which global block is what the
types have proved.
"""

from __future__ import annotations

from autoshard.proof import composites, pieces, readings, rms_norm, vocab_losses
from autoshard.proof.reader import Reading

READINGS: dict[object, Reading] = {
    **readings.TABLE,
    **pieces.TABLE,
    **composites.TABLE,
    **rms_norm.TABLE,
    **vocab_losses.TABLE,
}
