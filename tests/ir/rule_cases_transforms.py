"""What each rule of complex numbers, Fourier transforms and patches is tried with."""

from __future__ import annotations

import torch

from tests.ir.rule_cases import Case, f

aten = torch.ops.aten


def c(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.complex128)


_OF_PARTS = "_conj conj conj_physical _conj_physical resolve_conj resolve_neg real imag angle"
_OF_ONE_DIM = "fft_fft fft_ifft fft_irfft fft_hfft"
_OF_TWO_DIMS = "fft_fft2 fft_ifft2 fft_irfft2"
_OF_DIMS = "fft_fftn fft_ifftn fft_irfftn fft_fftshift fft_ifftshift"
_WINDOW = ([2, 2], [1, 1], [0, 0], [2, 2])


def _op(name: str) -> object:
    return getattr(aten, name).default


TRANSFORMS: dict[str, Case] = {
    "view as complex": lambda: (aten.view_as_complex.default, f(4, 8, 2)),
    "view as real": lambda: (aten.view_as_real.default, c(4, 8)),
    "complex": lambda: (aten.complex.default, f(4, 8), f(4, 8)),
    "polar": lambda: (aten.polar.default, f(4, 8), f(4, 8)),
    "product of complex numbers": lambda: (aten.mul.Tensor, c(4, 8, 2), c(8, 2)),
    "negative view": lambda: (aten._neg_view.default, f(4, 8)),
    **{name: lambda name=name: (_op(name), c(4, 8)) for name in _OF_PARTS.split()},
    **{name: lambda name=name: (_op(name), c(4, 8, 2), None, 1) for name in _OF_ONE_DIM.split()},
    **{name: lambda name=name: (_op(name), c(4, 8, 4)) for name in _OF_TWO_DIMS.split()},
    **{f"{n} of all": lambda n=n: (_op(n), c(4, 8)) for n in ["fft_fftn", "fft_fftshift"]},
    **{
        name: lambda name=name: (_op(name), c(4, 8, 4), *([] if "shift" in name else [None]), [1])
        for name in _OF_DIMS.split()
    },
    "fft_rfft": lambda: (aten.fft_rfft.default, f(4, 8)),
    "fft_ihfft": lambda: (aten.fft_ihfft.default, f(4, 8)),
    "fft_rfft2": lambda: (aten.fft_rfft2.default, f(4, 2, 8)),
    "fft_rfftn": lambda: (aten.fft_rfftn.default, f(4, 2, 8), None, [0, 2]),
    "fft_fftn of the last sizes": lambda: (aten.fft_fftn.default, c(4, 8, 4), [6]),
    "_fft_c2c": lambda: (aten._fft_c2c.default, c(4, 8, 4), [1, 2], 0, True),
    "_fft_r2c": lambda: (aten._fft_r2c.default, f(4, 8, 4), [1], 0, True),
    "_fft_c2r": lambda: (aten._fft_c2r.default, c(4, 8, 3), [2], 0, 4),
    "im2col": lambda: (aten.im2col.default, f(4, 2, 4, 4), *_WINDOW),
    "im2col of one": lambda: (aten.im2col.default, f(2, 4, 4), *_WINDOW),
    "col2im": lambda: (aten.col2im.default, f(4, 8, 4), [4, 4], *_WINDOW),
}
