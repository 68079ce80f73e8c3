"""One registry for our operators: schema, fake, transpose, and the code that runs them on a rank.

Operators that speak to other ranks name a mesh *axis*; the communicator that knows the axis' ranks
is handed to ``run`` by generated code, so one graph text serves all ranks and lock step alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

NAMESPACE = "autoshard"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class Traffic:
    """One collective that an operator performs: on each rank ``nbytes`` enter it."""

    kind: str  # "all_reduce", "all_gather", "reduce_scatter", "broadcast"
    axis: str
    nbytes: int
    members: tuple[int, ...] = ()  # places along the axis that take part; none means all

    def ranks(self, size: int) -> int:
        """Return how many ranks take part on an axis of ``size`` ranks."""
        return len(self.members) or size


@dataclass(frozen=True)
class OpSpec:
    """How an operator runs on a rank, and which collectives it performs."""

    name: str
    run: Callable[..., object]  # run(comm, *args): comm is a Communicator
    traffic: Callable[..., tuple[Traffic, ...]]  # traffic(*fake_args) -> collectives, in order


_specs: dict[object, OpSpec] = {}
_direct: dict[object, Callable[..., object]] = {}


def define(
    schema: str,
    *,
    fake: Callable[..., object],
    run: Callable[..., object],
    backward: Callable[..., object] | None = None,
    setup: Callable[..., None] | None = None,
    traffic: Callable[..., tuple[Traffic, ...]] = lambda *args: (),
) -> object:
    """Define ``autoshard::schema`` and return the op overload to put in graphs.

    ``fake`` gives shapes; ``run(comm, *args)`` computes on a rank; ``backward(ctx, *grads)`` and
    ``setup(ctx, inputs, output)`` are as in ``torch.library.register_autograd``.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library
        )
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    _specs[op] = OpSpec(name, run, traffic)
    return op


def spec(op: object) -> OpSpec | None:
    """Return the OpSpec of one of our operators, or None for any other target."""
    return _specs.get(op)


def call_directly(op: object, function: Callable[..., object]) -> None:
    """Let generated code call ``function`` in place of ``op``, without the dispatcher's time.

    ``function`` takes the same arguments and needs not be differentiable: programs hold their
    backward explicitly.
    """
    _direct[op] = function


def direct(op: object) -> object:
    """Return what generated code should call for ``op``: a function of ours, or ``op`` itself."""
    return _direct.get(op, op)
