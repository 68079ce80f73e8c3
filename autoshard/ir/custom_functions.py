"""Custom autograd functions: export inlines their forward and loses their backward.

That is harmless exactly when the backward is the derivative of the forward (a hand-written GELU,
as in Hugging Face's BLOOM), and silently wrong otherwise (a straight-through estimator). So each
function is tried on random float64 inputs of several magnitudes, both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd import Function

from autoshard.diagnostics import CaptureError
from autoshard.ir.user_line import line_here, span_of

# Hand-written constants carry about nine digits; a different derivative is off by far more.
TOLERANCE = 1e-6
MAGNITUDES = (0.1, 1.0, 30.0)
# Long dimensions are tried at this length: what such functions compute is rarely larger than a row.
LONGEST = 61


@dataclass(frozen=True)
class _Call:
    function: type[Function]
    args: tuple[object, ...]
    line: str


@dataclass
class CustomFunctions:
    """The custom functions that were applied while the model was traced."""

    calls: dict[object, _Call] = field(default_factory=dict)

    def note(self, function: type[Function], args: tuple[object, ...]) -> None:
        """Remember one call by its function and the shapes of its arguments."""
        described = tuple(_describe(arg) for arg in args)
        key = (function, str(described))
        if key not in self.calls:
            self.calls[key] = _Call(function, described, line_here())

    def check(self) -> None:
        """Refuse functions whose backward is not the derivative of their forward."""
        for call in self.calls.values():
            gap = _largest_gap(call)
            if not gap <= TOLERANCE:
                _refuse(call, gap)


@dataclass(frozen=True)
class _Shape:
    """Stands for a tensor argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _describe(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    # Equal lengths stay equal, different ones differ.
    shape = tuple(n if n <= LONGEST else LONGEST + n % 7 for n in value.shape)
    return _Shape(shape, value.dtype, value.is_floating_point())


def _largest_gap(call: _Call) -> float:
    """Return the largest relative difference of gradients, inf where the function won't run."""
    draw = torch.Generator().manual_seed(0)
    gap = 0.0
    for magnitude in MAGNITUDES:
        args = tuple(_make(arg, magnitude, draw) for arg in call.args)
        try:
            with torch.enable_grad():
                gap = max(gap, _gap(call.function, args, draw))
        except Exception:  # any failure of foreign code means that we can't vouch for it
            return float("inf")
    return gap


def _make(value: object, magnitude: float, draw: torch.Generator) -> object:
    if not isinstance(value, _Shape):
        return value
    if not value.requires_grad:
        return torch.zeros(value.shape, dtype=value.dtype)
    made = torch.randn(value.shape, generator=draw, dtype=torch.float64) * magnitude
    return made.requires_grad_()


def _gap(function: type[Function], args: tuple[object, ...], draw: torch.Generator) -> float:
    inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    theirs = _floats(function.apply(*args))
    plain = _floats(_plain_forward(function, args))
    seeds = [torch.randn(v.shape, generator=draw, dtype=v.dtype) * 100 for v in theirs]
    wanted = torch.autograd.grad(theirs, inputs, seeds, allow_unused=True)
    got = [None] * len(inputs)
    if any(value.requires_grad for value in plain):
        got = torch.autograd.grad(plain, inputs, seeds, allow_unused=True)
    return max((_difference(a, b) for a, b in zip(got, wanted, strict=True)), default=0.0)


def _difference(got: Tensor | None, wanted: Tensor | None) -> float:
    if got is None and wanted is None:
        return 0.0
    wanted = torch.zeros_like(got) if wanted is None else wanted
    got = torch.zeros_like(wanted) if got is None else got
    return ((got - wanted).abs().max() / (wanted.abs().max() + 1e-30)).item()


def _plain_forward(function: type[Function], args: tuple[object, ...]) -> object:
    """Run the forward as export does: as ordinary differentiable code."""
    if function.setup_context is not Function.setup_context:
        return function.forward(*args)
    return function.forward(_Context(args), *args)


class _Context:
    """What a forward may do with its context; nothing of it matters here."""

    def __init__(self, args: tuple[object, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(arg, Tensor) for arg in args)

    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: None


def _floats(outputs: object) -> list[Tensor]:
    listed = outputs if isinstance(outputs, list | tuple) else [outputs]
    return [v for v in listed if isinstance(v, Tensor) and v.is_floating_point()]


def _refuse(call: _Call, gap: float) -> None:
    name = call.function.__name__
    why = "can't be tried alone" if gap == float("inf") else f"differs by {gap:.1e}"
    raise CaptureError(
        f"custom autograd.Function `{name}`: capture would lose its backward, which is not the"
        f" derivative of its forward ({why})",
        code="AS702",
        span=span_of(call.line),
        help="register the operation with torch.library.custom_op and register_autograd, or write"
        " it in plain torch",
    )
