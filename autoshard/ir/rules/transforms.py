"""Complex numbers, Fourier transforms and image patches: linear, over dims that are whole."""

from __future__ import annotations

import torch

from autoshard.ir.placement import Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import Factors, solve
from autoshard.ir.rules.pointwise import overloads, pointwise

aten = torch.ops.aten
JOINT = (frozenset({0}),)


def _as_complex(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``...p -> ...``: the two parts of a number stay together."""
    labels = tuple(range(len(call.shapes[0])))
    factors = Factors((labels,), (labels[:-1],), whole=frozenset(labels[-1:]), linear=JOINT)
    return solve(factors, call, ins)


def _as_real(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``... -> ...p``."""
    labels = tuple(range(len(call.shapes[0])))
    return solve(Factors((labels,), ((*labels, "parts"),), linear=JOINT), call, ins)


def _fourier(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Each coefficient needs all values along the transformed dims."""
    labels = tuple(range(len(call.shapes[0])))
    whole = frozenset(_transformed(call))
    return solve(Factors((labels,), (labels,), whole=whole, linear=JOINT), call, ins)


def _transformed(call: Call) -> tuple[int, ...]:
    """Return the dims of a transform; one of n dims takes as many of the last as it has sizes."""
    sizes = call.arguments.get("s")
    if call.arguments.get("dim") is None and sizes:
        rank = len(call.shapes[0])
        return tuple(range(rank - len(sizes), rank))
    return call.dims()


def _patches(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``nchw -> npl`` and back: windows move over space, patches hold channels; samples split."""
    ranks = (len(call.shapes[0]), len(call.outs[0]))
    sample = ("n",) if max(ranks) == 4 else ()
    labels, made = ((*sample, *range(rank - len(sample))) for rank in ranks)
    whole = frozenset(range(max(ranks)))
    return solve(Factors((labels,), (made,), whole=whole, linear=JOINT), call, ins)


_PARTS = """
    _conj.default conj.default conj_physical.default _conj_physical.default resolve_conj.default
    resolve_neg.default _neg_view.default real.default imag.default
"""
_TRANSFORMS = """
    fft_fft.default fft_ifft.default fft_rfft.default fft_irfft.default fft_hfft.default
    fft_ihfft.default fft_fft2.default fft_ifft2.default fft_rfft2.default fft_irfft2.default
    fft_fftn.default fft_ifftn.default fft_rfftn.default fft_irfftn.default fft_fftshift.default
    fft_ifftshift.default _fft_c2c.default _fft_r2c.default _fft_c2r.default
"""

TABLE: dict[object, Rule] = {
    aten.view_as_complex.default: _as_complex,
    aten.view_as_real.default: _as_real,
    **dict.fromkeys(overloads(_PARTS), pointwise((0,))),
    aten.complex.default: pointwise((0, 1)),
    **dict.fromkeys(overloads("polar.default angle.default"), pointwise()),
    **dict.fromkeys(overloads(_TRANSFORMS), _fourier),
    **dict.fromkeys(overloads("im2col.default col2im.default"), _patches),
}
