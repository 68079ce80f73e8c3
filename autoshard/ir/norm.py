"""Who counts which gradient in the norm of the whole model: every element once, on one rank.

The run-time clips by this rule, and the check of types goes through all ranks with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from autoshard.ir.params import ParamSpec
from autoshard.ir.program import Bucket

NORM_AXES = ("dp", "tp", "pp")  # over these the ranks' sums are added


def counts_in_norm(
    spec: ParamSpec,
    bucket: Bucket,
    index: Callable[[str], int],
    stages: Collection[int],
    own: bool = False,
) -> bool:
    """Tell whether a rank counts what it stores of a parameter's gradient.

    ``index`` gives the rank's place along an axis, ``stages`` are those that it runs. Copies count
    on the first rank that has one, a tied parameter on its owner's. With ``own`` it tells that of
    the rows before the copies, which each rank has to itself: see ``Copies.own_rows``.
    """
    is_first_copy = bucket.replicas is None or index(bucket.replicas) == 0
    times = spec.copies.times if spec.copies and not own else 1
    is_first_part = index("tp") % times == 0 if spec.is_sharded("tp") else index("tp") == 0
    return is_first_copy and is_first_part and spec.homes[0] in stages
