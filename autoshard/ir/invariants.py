"""The registry of invariants: what each name promises, and the function that checks it.

A checker takes a Program and raises an AutoshardError; the pass manager runs those that hold after
every pass. A plugin adds its own with ``CHECKERS[name] = check``.
"""

from __future__ import annotations

from collections.abc import Callable

from autoshard.ir.invariants_pipeline import check_joint, check_phased, check_staged
from autoshard.ir.invariants_schedule import check_schedulable
from autoshard.ir.invariants_storage import check_bounded, check_bucketed, check_gathered
from autoshard.ir.program import Program

CHECKERS: dict[str, Callable[[Program], None]] = {
    "staged": check_staged,
    "joint": check_joint,
    "phased": check_phased,
    "gathered": check_gathered,
    "bucketed": check_bucketed,
    "bounded": check_bounded,
    "schedulable": check_schedulable,
}
