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
    reference: Callable[..., object] | None = None  # as run, by torch's operators alone


@dataclass(frozen=True)
class _Direct:
    function: Callable[..., object]
    reference: Callable[..., object]


_specs: dict[object, OpSpec] = {}
_direct: dict[object, _Direct] = {}


def define(
    schema: str,
    *,
    fake: Callable[..., object],
    run: Callable[..., object],
    backward: Callable[..., object] | None = None,
    setup: Callable[..., None] | None = None,
    traffic: Callable[..., tuple[Traffic, ...]] = lambda *args: (),
    reference: Callable[..., object] | None = None,
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
    _specs[op] = OpSpec(name, run, traffic, reference)
    return op


def spec(op: object) -> OpSpec | None:
    """Return the OpSpec of one of our operators, or None for any other target."""
    return _specs.get(op)


def call_directly(
    op: object, function: Callable[..., object], reference: Callable[..., object]
) -> None:
    """Let generated code call ``function`` in place of ``op``, without the dispatcher's time.

    Both take the same arguments as ``op`` and need not be differentiable: programs hold their
    backward explicitly. ``reference`` computes the same by torch's operators alone.
    """
    _direct[op] = _Direct(function, reference)


def bound(op: object, kernels: str = "auto") -> tuple[Callable[..., object], bool]:
    """Return what generated code calls for ``op``, and whether it takes the communicator first.

    ``kernels`` is "auto" or, to use no kernel of ours, "reference".
    """
    own, direct = spec(op), _direct.get(op)
    is_reference = kernels == "reference"
    if own is not None:
        return (own.reference if is_reference and own.reference else own.run), True
    if direct is not None:
        return (direct.reference if is_reference else direct.function), False
    return op, False
