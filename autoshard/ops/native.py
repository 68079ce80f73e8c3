"""The compiled kernels, if they were built, and why not where they were not.

``autoshard._native`` (CPU) and ``autoshard._native_cuda`` are optional: every op has a reference in
torch ops and works without them.  Kernels take raw addresses; the functions here allocate results
and pass addresses on.  They trust their arguments: the ops check them first.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from autoshard.ops.norm_checks import statistics_shape


@dataclass(frozen=True)
class NativeLibrary:
    """One optional compiled module: the module itself, or the reason why there is none."""

    name: str
    module: ModuleType | None
    reason: str  # empty when the module was loaded


def _load(name: str) -> NativeLibrary:
    try:
        return NativeLibrary(name, importlib.import_module(name), "")
    except ImportError as error:
        # A missing library is a supported way to run; `autoshard env` prints the reason.
        return NativeLibrary(name, None, _explain(name, error))


def _explain(name: str, error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return "not built"
    return f"built but does not load: {error}"


CPU = _load("autoshard._native")
CUDA = _load("autoshard._native_cuda")

# The type tags of csrc/add_layer_norm.h; a dtype that is not here goes through the reference.
_TAGS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MODULES = {"cpu": CPU.module, "cuda": CUDA.module}

LayerNormResults = tuple[Tensor, Tensor, Tensor, Tensor]
RmsNormResults = tuple[Tensor, Tensor, Tensor]


def has_kernel(x: Tensor) -> bool:
    """Return whether a compiled kernel takes tensors of this device and dtype."""
    return _MODULES.get(x.device.type) is not None and x.dtype in _TAGS


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> LayerNormResults:
    """Return (y, s, mean, rstd) by the compiled kernel."""
    x, residual, weight, bias = _dense(x, residual, weight, bias)
    y, s = torch.empty_like(x), torch.empty_like(x)
    mean = x.new_empty(statistics_shape(x), dtype=torch.float32)
    rstd = torch.empty_like(mean)
    parameter = weight if weight is not None else bias
    _MODULES[x.device.type].add_norm_forward(
        *_addresses(x, residual, weight, bias, y, s, mean, rstd),
        *_sizes(x, parameter),
        eps,
        _lane(x),
    )
    return y, s, mean, rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> RmsNormResults:
    """Return (y, s, rstd) by the compiled kernel."""
    x, residual, weight = _dense(x, residual, weight)
    y, s = torch.empty_like(x), torch.empty_like(x)
    rstd = x.new_empty(statistics_shape(x), dtype=torch.float32)
    _MODULES[x.device.type].add_norm_forward(
        *_addresses(x, residual, weight, None, y, s, None, rstd), *_sizes(x, weight), eps, _lane(x)
    )
    return y, s, rstd


def add_norm_backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dweight, dbias) by the compiled kernel; RMSNorm when ``mean`` is None."""
    dy, ds, s, mean, rstd, weight = _dense(dy, ds, s, mean, rstd, weight)
    dx = torch.empty_like(s)
    dtype = s.dtype if weight is None else weight.dtype
    dweight = s.new_empty([0 if weight is None else s.shape[-1]], dtype=dtype)
    dbias = s.new_empty([s.shape[-1] if has_bias else 0], dtype=dtype)
    _MODULES[s.device.type].add_norm_backward(
        *_addresses(dy, ds, s, mean, rstd, weight, dx, dweight, dbias),
        *_sizes(s, weight),
        *_backward_lane(s),
    )
    return dx, dweight, dbias


def _dense(*values: Tensor | None) -> list[Any]:
    return [None if value is None else value.contiguous() for value in values]


def _addresses(*values: Tensor | None) -> list[int]:
    # An empty tensor's address is 0, which the kernels read as "not wanted".
    return [0 if value is None else value.data_ptr() for value in values]


def _sizes(x: Tensor, parameter: Tensor | None) -> tuple[int, int, int, int]:
    hidden = x.shape[-1]
    tag = _TAGS[x.dtype]
    return x.numel() // hidden, hidden, tag, tag if parameter is None else _TAGS[parameter.dtype]


def _lane(x: Tensor) -> int:
    """Return where a kernel runs: the number of threads on CPU, the stream handle on CUDA."""
    if x.device.type == "cpu":
        return torch.get_num_threads()
    return torch.cuda.current_stream(x.device).cuda_stream


def _backward_lane(s: Tensor) -> tuple[int, ...]:
    """Return where a backward runs; on CUDA with the address of its workspace.

    The workspace may be freed at once: the allocator hands it only to later work of this stream.
    """
    if s.device.type == "cpu":
        return (torch.get_num_threads(),)
    hidden = s.shape[-1]
    floats = CUDA.module.workspace_floats(s.numel() // hidden, hidden, _TAGS[s.dtype])
    workspace = torch.empty(floats, dtype=torch.float32, device=s.device)
    return (_lane(s), workspace.data_ptr())
