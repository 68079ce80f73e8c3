"""The one place that touches semi-public parts of torch, so that a new torch is fixed here.

Everything else uses public torch only. What is named here was read in torch 2.11 to 2.14 and run
on 2.13; each name says what it stands for.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = (
    "DATA_DEPENDENT",
    "ExportedProgram",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "export_functional",
    "fake_like",
    "graph_under_trace",
    "make_fx",
    "quiet_export",
)

# What export raises when Python needs a value that only exists at run time.
DATA_DEPENDENT = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)


def fake_like(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake CPU tensor with the shape, strides and dtype of ``value``; reads no data.

    Always on the CPU device: the meta device loses the backward, and the graph of a stage must not
    depend on where the user's model happens to lie.
    """
    with mode:
        if value.layout is not torch.strided:
            return torch.empty(value.shape, dtype=value.dtype)
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def graph_under_trace() -> torch.fx.Graph:
    """Return the graph that ``make_fx`` is building; for use inside the traced function only."""
    return get_proxy_mode().tracer.graph


def export_functional(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> ExportedProgram:
    """Return ``module`` exported for ``args``: non-strict, training IR, not yet functional."""
    with quiet_export():
        return torch.export.export(module, args, strict=False)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Keep torch's own deprecation warnings, raised inside export, out of the user's log."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*torch.export.*")
        yield
