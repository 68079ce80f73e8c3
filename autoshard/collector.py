"""Python's cyclic garbage collector, kept out of work that only makes objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let the collector start no run by itself inside; it is as it was afterwards.

    Graphs of a deep model are some hundred thousand objects that stay: each run would look at all
    of them again. Reference counts free what is in no cycle as ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
