"""Read a schedule that another system wrote: torch's CSV form, from a file."""

from dataclasses import replace
from pathlib import Path

from autoshard.diagnostics import ScheduleError
from autoshard.schedule.schedule import Schedule


def read_schedule(path: Path, shown: str = "") -> Schedule:
    """Return the schedule in the file at ``path``, named after it.

    Raises ScheduleError that names the file, as ``shown`` if given, and the line.
    """
    shown = shown or str(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ScheduleError(f"can't read the schedule `{shown}`: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScheduleError(f"the schedule `{shown}` is no text") from error
    try:
        return Schedule.from_csv(text, path.stem)
    except ScheduleError as error:
        named = (replace(d, message=f"`{shown}`: {d.message}") for d in error.diagnostics)
        raise ScheduleError(named) from error
