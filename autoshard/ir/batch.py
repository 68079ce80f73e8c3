"""The micro-batch as named leaves, and how a model and a loss are called with it.

A dict gives leaves by key, a tuple by position ("0", "1"), nested ones by path ("inputs.mask").
Leaves that aren't tensors are constants of the program.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from autoshard.diagnostics import BatchError, CaptureError
from autoshard.ir.program import BatchLeaf

Loss = Callable[[object, object], torch.Tensor]
Leaves = dict[str, torch.Tensor]


def batch_leaves(batch: object) -> Leaves:
    """Return the tensors of a (micro-)batch by name, in order.

    >>> list(batch_leaves({"ids": torch.zeros(2, 3), "extra": (torch.zeros(2), 5)}))
    ['ids', 'extra.0']
    """
    leaves = dict(_walk(batch, ""))
    if not leaves:
        kind = type(batch).__name__
        raise BatchError(
            f"the batch holds no tensor: it is a `{kind}`",
            code="AS710",
            help="a batch is a dict or a tuple of tensors",
        )
    return leaves


def leaf_specs(leaves: Mapping[str, torch.Tensor]) -> tuple[BatchLeaf, ...]:
    """Describe the leaves; those of size 1 beside larger ones are given to every micro-batch."""
    rows = max((v.shape[0] for v in leaves.values() if v.dim()), default=1)
    return tuple(
        BatchLeaf(name, tuple(v.shape), v.dtype, bool(v.dim()) and (v.shape[0] > 1 or rows == 1))
        for name, v in leaves.items()
    )


def share_leaves(leaves: Mapping[str, torch.Tensor], count: int) -> list[Leaves]:
    """Return the local batches of ``count`` data parallel ranks: contiguous shares of dim 0.

    Leaves of size 1 are given to every rank.
    """
    shares: list[Leaves] = [{} for _ in range(count)]
    for name, value in leaves.items():
        is_split = bool(value.dim()) and value.shape[0] > 1
        parts = value.chunk(count) if is_split else (value,) * count
        for share, part in zip(shares, parts, strict=True):
            share[name] = part
    return shares


def rebuild(batch: object, leaves: Mapping[str, torch.Tensor], path: str = "") -> object:
    """Return ``batch`` with its tensors replaced by ``leaves`` of the same names."""
    if isinstance(batch, torch.Tensor):
        return leaves[path or "0"]
    if isinstance(batch, Mapping):
        return {key: rebuild(v, leaves, join(path, str(key))) for key, v in batch.items()}
    if isinstance(batch, list | tuple):
        items = [rebuild(v, leaves, join(path, str(i))) for i, v in enumerate(batch)]
        named = hasattr(batch, "_fields")
        return type(batch)(*items) if named else type(batch)(items)
    return batch


def call_model(model: nn.Module, batch: object) -> object:
    """Call the model as the engine does: a dict by the keys that ``forward`` names, else by place.

    A ``**kwargs`` in the signature takes all keys.
    """
    if isinstance(batch, Mapping):
        return model(**_named_arguments(model, batch))
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def compute(model: nn.Module, loss: Loss | None, batch: object) -> tuple[str, dict]:
    """Return ("loss", {"": loss}) or, where there is none, ("output", the output's leaves)."""
    output = call_model(model, batch)
    if loss is not None:
        return "loss", {"": check_loss(loss(output, batch), "the loss function")}
    own = _own_loss(output)
    if own is not None:
        return "loss", {"": check_loss(own, "the model")}
    leaves = dict(_walk(output, ""))
    return "output", leaves


def check_loss(value: object, giver: str) -> torch.Tensor:
    """Return ``value`` if it is a 0-d float tensor, else refuse it with its shape."""
    if not isinstance(value, torch.Tensor):
        raise CaptureError(
            f"{giver} returned a `{type(value).__name__}`, need a 0-d tensor",
            code="AS708",
            help="return the loss as a tensor of shape []",
        )
    if value.dim() or not value.is_floating_point():
        dtype = str(value.dtype).removeprefix("torch.")
        raise CaptureError(
            f"{giver} returned a loss of shape {list(value.shape)} and type {dtype},"
            " need a 0-d float tensor",
            code="AS708",
            help="reduce it, for example with .mean()",
        )
    return value


def _own_loss(output: object) -> torch.Tensor | None:
    """Return the loss that the model itself computed, if any."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    is_scalar = isinstance(output, torch.Tensor) and output.dim() == 0
    return output if is_scalar else None


def _named_arguments(model: nn.Module, batch: Mapping) -> dict[str, object]:
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(batch)
    _refuse_missing(model, batch, parameters)
    return {p.name: batch[p.name] for p in parameters if p.name in batch}


def _refuse_missing(
    model: nn.Module, batch: Mapping, parameters: Sequence[inspect.Parameter]
) -> None:
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.kind in plain and p.default is p.empty]
    missing = [name for name in needed if name not in batch]
    if missing:
        raise CaptureError(
            f"{type(model).__name__}.forward needs {_quoted(missing)};"
            f" the batch has {_quoted(batch)}",
            code="AS710",
            help="name the batch's keys as forward names its arguments, or give a tuple",
        )


def _quoted(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _walk(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path or "0", value
        return
    for key, item in _items(value):
        yield from _walk(item, join(path, str(key)))


def _items(value: object) -> Sequence[tuple[object, object]]:
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, list | tuple):
        return tuple(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    return ()


def join(path: str, name: str) -> str:
    """Return the dotted path of ``name`` below ``path``."""
    return f"{path}.{name}" if path else name
