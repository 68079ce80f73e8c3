"""Schedules of pipeline parallelism as data: made, lowered, validated, proved and simulated.

Everything here is free of torch and uses the standard library only.
"""

from autoshard.schedule.action import Action, Kind
from autoshard.schedule.costs import Costs
from autoshard.schedule.event import Event
from autoshard.schedule.lower import lower_schedule
from autoshard.schedule.make import SCHEDULES, make_schedule, place_stages
from autoshard.schedule.order import OrderVerdict, prove_order
from autoshard.schedule.programs import Inside, spell_out
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.validate import find_problems, validate_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Event",
    "Inside",
    "Kind",
    "OrderVerdict",
    "Schedule",
    "find_problems",
    "lower_schedule",
    "make_schedule",
    "place_stages",
    "prove_order",
    "spell_out",
    "validate_schedule",
]
