"""Look at a model without touching its numbers: its parameters swapped for fakes for a while."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from autoshard.compat import FakeTensorMode, fake_like
from autoshard.ir.params import ParamSpec, ParamTable

# Attributes that hold a module's parameters, buffers and submodules; the last one is nn.LSTM's.
TABLES = ("_parameters", "_buffers", "_modules", "_flat_weights")


@dataclass(frozen=True)
class Names:
    """The names of one tensor of the model, first one canonical."""

    names: tuple[str, ...]
    value: torch.Tensor
    is_buffer: bool
    persistent: bool = True


def tensor_names(model: nn.Module) -> tuple[Names, ...]:
    """Return every distinct parameter, then every distinct buffer, with all its names."""
    params: dict[int, list[str]] = {}
    values: dict[int, torch.Tensor] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        params.setdefault(id(param), []).append(name)
        values[id(param)] = param
    buffers: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        buffers.setdefault(id(buffer), []).append(name)
        values[id(buffer)] = buffer
    saved = _persistent(model)
    found = [Names(tuple(n), values[key], False) for key, n in params.items()]
    found += [
        Names(tuple(n), values[key], True, any(name in saved for name in n))
        for key, n in buffers.items()
    ]
    return tuple(found)


def param_table(model: nn.Module) -> ParamTable:
    """Return the table of all parameters and buffers of ``model``, used or not."""
    return ParamTable(
        tuple(
            ParamSpec(
                fqn=entry.names[0],
                shape=tuple(entry.value.shape),
                dtype=entry.value.dtype,
                requires_grad=entry.value.requires_grad and not entry.is_buffer,
                is_buffer=entry.is_buffer,
                persistent=entry.persistent,
                aliases=entry.names[1:],
            )
            for entry in tensor_names(model)
        )
    )


def without_values(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with its parameters and buffers on the meta device.

    A model that can't be copied is returned as it is.
    """
    memo: dict[int, torch.Tensor] = {}
    for entry in tensor_names(model):
        value = torch.empty_like(entry.value, device="meta", requires_grad=False)
        if not entry.is_buffer:
            value = nn.Parameter(value, requires_grad=entry.value.requires_grad)
        memo[id(entry.value)] = value
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # it holds a lock, a process group, or whatever a user's model may hold
        return model


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Swap all parameters and buffers for fakes on the CPU; restore on exit."""
    with swapped(model, lambda value: fake_like(value, mode)):
        yield


@contextmanager
def swapped(
    model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Swap all parameters and buffers for ``make(value)``; ties stay ties; restore on exit.

    Gives the new tensors by canonical name; new parameters want gradients where the old ones did.
    """
    new: dict[int, torch.Tensor] = {}
    named = {}
    for entry in tensor_names(model):
        value = make(entry.value)
        if not entry.is_buffer:
            value = nn.Parameter(value, requires_grad=entry.value.requires_grad)
        new[id(entry.value)] = named[entry.names[0]] = value
    undo: list[tuple[nn.Module, dict, str, torch.Tensor]] = []
    try:
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, value in tuple(held.items()):
                    if value is not None:
                        undo.append((module, held, name, value))
                        _put(module, held, name, new[id(value)])
        yield named
    finally:
        for module, held, name, value in undo:
            _put(module, held, name, value)


def _put(module: nn.Module, held: dict, name: str, value: torch.Tensor) -> None:
    """Set a parameter or buffer; recurrent modules keep a second list, which only they can set."""
    if isinstance(module, nn.RNNBase):
        setattr(module, name, value)
    else:
        held[name] = value


@contextmanager
def mode_of(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the model in train or eval mode and every module back as it was on exit.

    A model that is in train mode already keeps the submodules that the user put in eval mode.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        if not (training and model.training):
            model.train(training)
        yield
    finally:
        for module, flag in before:
            module.training = flag


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[dict[nn.Module, dict[str, object]]]:
    """Give the attributes of all modules and put them back on exit, lists with their items."""
    before = {module: dict(module.__dict__) for module in model.modules()}
    lists = [
        (value, tuple(value))
        for attributes in before.values()
        for value in attributes.values()
        if isinstance(value, list)
    ]
    try:
        yield before
    finally:
        for module, attributes in before.items():
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
        for value, items in lists:
            value[:] = items


def _persistent(model: nn.Module) -> frozenset[str]:
    names = []
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        names += [
            prefix + name
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
    return frozenset(names)
