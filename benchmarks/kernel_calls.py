"""What one call of a fused norm costs where the numbers cost nothing."""

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from autoshard.ops import add_layer_norm, native

EPS = 1e-5


def dispatch(rounds: int) -> dict[str, float]:
    """Return the microseconds of one call on a tensor too small to matter, by way of calling."""
    x, weight = torch.randn(8, 16), torch.ones(16)
    leaf = x.clone().requires_grad_()
    kernels = native.CPU.module
    y, s, mean, rstd = add_layer_norm.forward(x, x, weight, weight, EPS)

    def train_eager() -> None:
        with torch.enable_grad():
            total = leaf + x
            normed = functional.layer_norm(total, (16,), weight, weight, EPS)
        torch.autograd.grad((normed, total), leaf, (x, x))

    def train_ours() -> None:
        add_layer_norm.forward(x, x, weight, weight, EPS)
        add_layer_norm.backward(x, x, s, mean, rstd, weight, True)

    runs: dict[str, Callable[[], object]] = {
        "eager": lambda: functional.layer_norm(x + x, (16,), weight, weight, EPS),
        "as generated code calls it": lambda: add_layer_norm.forward(x, x, weight, weight, EPS),
        "through the dispatcher": lambda: torch.ops.autoshard.add_layer_norm(
            x, x, weight, weight, EPS
        ),
        "eager, forward and backward": train_eager,
        "as generated code calls them, forward and backward": train_ours,
    }
    if kernels is not None:
        addresses = [t.data_ptr() for t in (x, x, weight, weight, y, s, rstd, rstd)]
        runs["binding alone"] = lambda: kernels.add_norm_forward(*addresses, 8, 16, 0, 0, EPS, 1)
    best = dict.fromkeys(runs, float("inf"))
    with torch.no_grad():
        for _ in range(rounds * 5):
            for name, run in runs.items():
                start = time.thread_time()
                for _ in range(200):
                    run()
                best[name] = min(best[name], (time.thread_time() - start) / 200)
    return {name: 1e6 * seconds for name, seconds in best.items()}
