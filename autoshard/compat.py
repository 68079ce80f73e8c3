"""The one place that touches semi-public parts of torch, so that a new torch is fixed here.

Everything else uses public torch only. What is named here was read in torch 2.11 to 2.14 and run
on 2.13; each name says what it stands for.
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch._library.custom_ops import OPDEFS
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.proxy import TracerBase
from torch.overrides import TorchFunctionMode

__all__ = (
    "DATA_DEPENDENT",
    "ExportedProgram",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "all_gather_into",
    "decompose",
    "export_functional",
    "fake_like",
    "graph_under_trace",
    "has_autograd",
    "inductor_compile",
    "is_composite",
    "make_fx",
    "reduce_scatter_into",
    "watch_lost_gradients",
)

# What export raises when Python needs a value that only exists at run time.
DATA_DEPENDENT = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)
SET_GRAD_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST_REGION = torch.ops.higher_order.wrap_with_autocast
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
_CHECKPOINT = "_checkpoint_without_reentrant_generator"


def fake_like(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake CPU tensor with the shape, strides and dtype of ``value``; reads no data.

    Always on the CPU device: the meta device loses the backward, and the graph of a stage must not
    depend on where the user's model happens to lie.
    """
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def inductor_compile(
    module: torch.fx.GraphModule, examples: list[torch.Tensor]
) -> Callable[..., list[torch.Tensor]]:
    """Return a flat inference graph as a function that Inductor made for inputs like these."""
    return torch._inductor.compile(module, examples)


def graph_under_trace() -> torch.fx.Graph:
    """Return the graph that ``make_fx`` is building; for use inside the traced function only."""
    return get_proxy_mode().tracer.graph


def export_functional(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> ExportedProgram:
    """Return ``module`` exported for ``args``: non-strict, training IR, not yet functional.

    Nodes carry every frame outside torch in their stack trace; export alone keeps only those of
    functions called "forward", which loses the user's own helpers and the loss.
    """
    with (
        _quiet(),
        torch.enable_grad(),
        _DataAsDetach(),
        mock.patch.object(
            TracerBase, "_filter_traceback_frames", _frames_outside_torch, create=True
        ),
    ):
        return torch.export.export(module, args, strict=False)


def decompose(exported: ExportedProgram) -> ExportedProgram:
    """Return the program made functional; linear, layer_norm, embedding ... stay whole."""
    with _quiet():
        return exported.run_decompositions({})


@contextmanager
def watch_lost_gradients(
    lost: Callable[[str], None], applied: Callable[[type, tuple], None]
) -> Iterator[None]:
    """Tell when the model does what export silently drops from gradients.

    ``lost(kind)`` for "checkpoint" and "inference_mode", both inlined away; ``applied(cls, args)``
    for a custom autograd.Function, whose forward is inlined and whose backward is lost.
    """
    kept = torch.autograd.Function.__dict__["apply"]
    kept_enter = torch.inference_mode.__enter__

    def apply(cls: type, *args: object, **kwargs: object) -> object:
        if cls.__name__ == "CheckpointFunction":
            lost("checkpoint")
        # What torch itself makes for a registered operator is kept whole by export.
        elif not cls.__module__.startswith("torch._"):
            applied(cls, args)
        return kept.__func__(cls, *args, **kwargs)

    def checkpoint(*args: object, **kwargs: object) -> None:
        lost("checkpoint")

    def enter(self: object) -> None:
        if _is_users_region(sys._getframe(1)):
            lost("inference_mode")
        kept_enter(self)

    patches = (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(torch.utils.checkpoint, _CHECKPOINT, checkpoint),
        mock.patch.object(torch.inference_mode, "__enter__", enter),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def has_autograd(op: torch._ops.OpOverload) -> bool:
    """Tell whether gradients flow through ``op`` (registered, or made of ops that have them)."""
    custom = OPDEFS.get(op.name().partition(".")[0])
    if custom is not None:
        # torch.library.custom_op always registers a kernel, one that raises where none was given.
        return custom._backward_fn is not None
    keys = ("Autograd", "AutogradCPU", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def _is_users_region(frame: FrameType) -> bool:
    """Tell whether a region was opened outside torch, by ``with`` or by a decorator."""
    decorated = frame.f_locals.get("func") if "_contextlib" in frame.f_code.co_filename else None
    code = getattr(decorated, "__code__", frame.f_code)
    return not _is_torch(code.co_filename)


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Tell whether ``op`` is made of others, below autograd's sight."""
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


class _DataAsDetach(TorchFunctionMode):
    """Read ``x.data`` as ``x.detach()``: on fakes the former escapes the trace."""

    def __torch_function__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func == _GET_DATA and _asked_by_user():
            return args[0].detach()
        return func(*args, **(kwargs or {}))


_GET_DATA = torch.Tensor.data.__get__


def _asked_by_user() -> bool:
    """Tell whether what the mode sees was called outside torch, whatever other modes are on."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return not _is_torch(frame.f_code.co_filename)


def _is_torch(file: str) -> bool:
    return file.startswith(_TORCH_FOLDER)


_TORCH_FOLDER = torch.__path__[0]


def _frames_outside_torch(self: object, summary: traceback.StackSummary) -> traceback.StackSummary:
    return traceback.StackSummary.from_list([f for f in summary if not _is_torch(f.filename)])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own deprecation warnings and logs, raised inside export, from the user."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*during export.*")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def all_gather_into(
    out: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work | None:
    """Start gathering ``value`` of all ranks into ``out``; the function's name changed in 2.13."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, value, group=group, async_op=True)


def reduce_scatter_into(
    out: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work | None:
    """Start summing ``value`` over ranks, each keeping its part, into ``out``."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, value, group=group, async_op=True)
