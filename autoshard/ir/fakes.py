"""Compute fake values once per distinct call.

A fake value says shape, strides and type, and follows from those of the inputs alone. The layers of
a deep model call the same operators on the same shapes, so that nearly every call has been seen
before: its fake value is then shared. Nothing writes to a fake value.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoshard.compat import FakeTensor, FakeTensorMode


class FakeMode(FakeTensorMode):
    """A mode for fake values that remembers the calls it has seen."""

    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        self.seen: dict[Hashable, object] = {}  # call -> its result


def refake(node: Node, mode: FakeTensorMode) -> None:
    """Compute the node's fake value from those of its inputs."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    seen = mode.seen if isinstance(mode, FakeMode) else {}
    key = _key((node.target, args, kwargs))
    if key is not None and key in seen:
        node.meta["val"] = seen[key]
        return
    with mode, torch.no_grad():
        value = node.target(*args, **kwargs)
    node.meta["val"] = value
    if key is not None and _is_plain(value):
        seen[key] = value


def fake_vector(length: int, dtype: torch.dtype, mode: FakeTensorMode) -> torch.Tensor:
    """Return the fake value of a flat buffer of ``length`` elements."""
    seen = mode.seen if isinstance(mode, FakeMode) else {}
    key = (fake_vector, length, dtype)
    if key not in seen:
        with mode:
            seen[key] = torch.empty(length, dtype=dtype, device="cpu")
    return seen[key]


def _key(call: object) -> Hashable | None:
    """Return what the result of a call depends on; None where that isn't known."""
    try:
        key = (_described(call), torch.get_default_dtype())
        hash(key)
    except TypeError:
        return None
    return key


def _described(value: object) -> Hashable:
    if isinstance(value, FakeTensor):
        if not _is_plain(value):
            raise TypeError("its elements are known")
        place = value.storage_offset()
        return (value.shape, value.stride(), place, value.dtype, value.device, value.requires_grad)
    if isinstance(value, torch.Tensor):
        raise TypeError("its elements are known")
    if isinstance(value, dict):
        return tuple((name, _described(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return (type(value), *map(_described, value))
    return (type(value), value)  # 1, 1.0 and True are equal as keys, but not as arguments


def _is_plain(value: object) -> bool:
    """Tell whether a result is described by its shape alone: some fakes know their elements."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return not isinstance(value, FakeTensor) or value.constant is None
