"""The registry of invariants: what each name promises, and the function that checks it.

A checker takes a Program and raises an AutoshardError that names place and cause; the pass manager
runs those that hold after every pass. A plugin adds its own with ``CHECKERS[name] = check``.
"""

from __future__ import annotations

from collections.abc import Callable

from autoshard.ir.invariants_forward import (
    check_global_loss,
    check_params_placed,
    check_placed,
    check_sourced,
    check_well_formed,
)
from autoshard.ir.invariants_pipeline import check_joint, check_phased, check_staged
from autoshard.ir.invariants_schedule import check_schedulable
from autoshard.ir.invariants_storage import check_bounded, check_bucketed, check_gathered
from autoshard.ir.program import Program

CHECKERS: dict[str, Callable[[Program], None]] = {
    "well_formed": check_well_formed,
    "sourced": check_sourced,
    "global_loss": check_global_loss,
    "params_placed": check_params_placed,
    "placed": check_placed,
    "staged": check_staged,
    "joint": check_joint,
    "phased": check_phased,
    "gathered": check_gathered,
    "bucketed": check_bucketed,
    "bounded": check_bounded,
    "schedulable": check_schedulable,
}
