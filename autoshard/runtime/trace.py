"""What a rank did in its last step, and when."""

from __future__ import annotations

from typing import NamedTuple

from autoshard.schedule import Action


class Done(NamedTuple):
    """One action, or transfers posted together, with its times in seconds on the rank's clock."""

    actions: tuple[Action, ...]
    start: float
    end: float
    waited: float  # seconds of it in which the rank was blocked on others
