"""What a rank did in its last step, and when."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.schedule import Action


@dataclass(frozen=True)
class Done:
    """One action, or transfers posted together, with its times in seconds on the rank's clock."""

    actions: tuple[Action, ...]
    start: float
    end: float
    waited: float  # seconds of it in which the rank was blocked on others
