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

from autoshard.diagnostics import OperatorError


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
_MODULES = {True: CPU.module, False: CUDA.module}  # by `x.is_cpu`, the cheapest question

LayerNormResults = tuple[Tensor, Tensor, Tensor, Tensor]
RmsNormResults = tuple[Tensor, Tensor, Tensor]


def has_kernel(x: Tensor) -> bool:
    """Return whether a compiled kernel takes tensors of this device and dtype."""
    return _MODULES.get(x.is_cpu) is not None and x.dtype in _TAGS and (x.is_cpu or x.is_cuda)


def module_of(x: Tensor) -> Any:
    """Return the compiled module for tensors of this device; ask ``has_kernel`` first."""
    return _MODULES[x.is_cpu]


def dropout(x: Tensor, runs: int, length: int, keys: Any) -> Tensor:
    """Return x with elements dropped; ``keys`` is the module's Dropout, see ``dropout_runs``."""
    x = _dense(x)
    y = torch.empty_like(x)
    module_of(x).dropout(x.data_ptr(), y.data_ptr(), runs, length, _TAGS[x.dtype], _lane(x), keys)
    return y


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> LayerNormResults:
    """Return (y, s, mean, rstd) by the compiled kernel."""
    x, residual, weight, bias = _dense(x), _dense(residual), _dense(weight), _dense(bias)
    y, s = torch.empty_like(x), torch.empty_like(x)
    mean = _statistics(x)
    rstd = torch.empty_like(mean)
    module_of(x).add_norm_forward(
        x.data_ptr(),
        residual.data_ptr(),
        _address(weight),
        _address(bias),
        y.data_ptr(),
        s.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        *_sizes(x, bias if weight is None else weight),
        eps,
        _lane(x),
    )
    return y, s, mean, rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> RmsNormResults:
    """Return (y, s, rstd) by the compiled kernel."""
    x, residual, weight = _dense(x), _dense(residual), _dense(weight)
    y, s = torch.empty_like(x), torch.empty_like(x)
    rstd = _statistics(x)
    module_of(x).add_norm_forward(
        x.data_ptr(),
        residual.data_ptr(),
        _address(weight),
        0,
        y.data_ptr(),
        s.data_ptr(),
        0,
        rstd.data_ptr(),
        *_sizes(x, weight),
        eps,
        _lane(x),
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
    dy, ds, s, weight = _dense(dy), _dense(ds), _dense(s), _dense(weight)
    mean, rstd = _dense(mean), _dense(rstd)
    dx = torch.empty_like(s)
    dweight, dbias = _gradients(s, weight, (weight is not None, has_bias))
    workspace = _workspace(s)
    module_of(s).add_norm_backward(
        dy.data_ptr(),
        _address(ds),
        s.data_ptr(),
        _address(mean),
        rstd.data_ptr(),
        _address(weight),
        dx.data_ptr(),
        dweight.data_ptr(),
        dbias.data_ptr(),
        *_sizes(s, weight),
        _lane(s),
        *(() if workspace is None else (workspace.data_ptr(),)),
    )
    return dx, dweight, dbias


def dropout_add_layer_norm(
    x: Tensor,
    input_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    keys: Any,
) -> LayerNormResults:
    """Return (y, s, mean, rstd) of the norm of ``dropout(x + input_bias) + residual``."""
    x, residual, input_bias = _dense(x), _dense(residual), _dense(input_bias)
    weight, bias = _dense(weight), _dense(bias)
    y, s = torch.empty_like(x), torch.empty_like(x)
    mean = _statistics(x)
    rstd = torch.empty_like(mean)
    parameter = next((p for p in (weight, bias, input_bias) if p is not None), None)
    module_of(x).dropout_add_norm_forward(
        x.data_ptr(),
        residual.data_ptr(),
        _address(weight),
        _address(bias),
        y.data_ptr(),
        s.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        *_sizes(x, parameter),
        eps,
        _lane(x),
        _address(input_bias),
        keys,
    )
    return y, s, mean, rstd


def dropout_add_norm_backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    has_bias: bool,
    has_input_bias: bool,
    keys: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (dx, dresidual, dinput_bias, dweight, dbias); an absent parameter's is empty."""
    dy, ds, s, weight = _dense(dy), _dense(ds), _dense(s), _dense(weight)
    mean, rstd = _dense(mean), _dense(rstd)
    dx, dresidual = torch.empty_like(s), torch.empty_like(s)
    wanted = (has_input_bias, weight is not None, has_bias)
    dinput_bias, dweight, dbias = _gradients(s, weight, wanted)
    workspace = _workspace(s)
    module_of(s).dropout_add_norm_backward(
        dy.data_ptr(),
        _address(ds),
        s.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        _address(weight),
        dresidual.data_ptr(),
        dweight.data_ptr(),
        dbias.data_ptr(),
        *_sizes(s, weight),
        _lane(s),
        *(() if workspace is None else (workspace.data_ptr(),)),
        dx.data_ptr(),
        dinput_bias.data_ptr(),
        keys,
    )
    return dx, dresidual, dinput_bias, dweight, dbias


def _dense(value: Any) -> Any:
    return value if value is None or value.is_contiguous() else value.contiguous()


def _address(value: Tensor | None) -> int:
    return 0 if value is None else value.data_ptr()


def _statistics(x: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


def _gradients(s: Tensor, weight: Tensor | None, wanted: tuple[bool, ...]) -> list[Tensor]:
    """Return room for parameter gradients; one that is not wanted is empty, its address 0."""
    dtype, device, hidden = s.dtype if weight is None else weight.dtype, s.device, s.shape[-1]
    return [torch.empty(hidden if want else 0, dtype=dtype, device=device) for want in wanted]


def _sizes(x: Tensor, parameter: Tensor | None) -> tuple[int, int, int, int]:
    hidden = x.shape[-1]
    tag = _TAGS[x.dtype]
    return x.numel() // hidden, hidden, tag, tag if parameter is None else _TAGS[parameter.dtype]


def _lane(x: Tensor) -> int:
    """Return where a kernel runs: the number of threads on CPU, the stream handle on CUDA."""
    if x.is_cpu:
        return torch.get_num_threads()
    if x.device.index != torch.cuda.current_device():
        current = torch.cuda.current_device()
        raise OperatorError(
            f"a kernel for tensors on {x.device} was called while cuda:{current} is current",
            help="call it under torch.cuda.device(tensor.device)",
        )
    return torch.cuda.current_stream(x.device).cuda_stream


def _workspace(s: Tensor) -> Tensor | None:
    """Return room for a CUDA backward's partial sums; keep it until the kernel is launched."""
    if s.is_cpu:
        return None
    hidden = s.shape[-1]
    floats = module_of(s).workspace_floats(s.numel() // hidden, hidden, _TAGS[s.dtype])
    return torch.empty(floats, dtype=torch.float32, device=s.device)
