"""Small models that capture must handle or refuse; each shows one habit of real code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Plain(nn.Module):
    """One layer; the models below change its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).sum()


class Branching(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = self.fc(x)
        return x.sum()


class ReadsItem(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x[: int(x.abs().max().item())]).sum()


class MasksByValue(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x[x > 0].view(-1, 4)).sum()


class StraightThrough(torch.autograd.Function):
    """Rounds, and pretends in backward that it did not."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class Quantizes(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return StraightThrough.apply(self.fc(x)).sum()


class HandWritten(torch.autograd.Function):
    """A square whose backward is its derivative."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class Squares(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return HandWritten.apply(self.fc(x)).sum()


class Checkpoints(Plain):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        run = torch.utils.checkpoint.checkpoint
        return run(self.fc, x, use_reentrant=self.reentrant).sum()


class InferenceMode(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = self.fc(x).mean()
        return self.fc(x).sum() * scale.item()


class NoGrad(Plain):
    """Uses one layer with and without gradients; the region must not leak any."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.fc(x)
            with torch.enable_grad():
                inner = self.fc(target)
        return ((self.fc(x) - target) ** 2).sum() + inner.sum() + self.fc(x).data.sum()


class PassesThrough(Plain):
    """Casts to the same type without gradients: that is the value itself, for later readers too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        with torch.no_grad():
            largest = y.float().contiguous().amax()
        return (y * largest).sum()


class Autocast(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.fc(x)
            with torch.autocast("cpu", enabled=False):
                x = self.fc(x.float())
        return x.float().sum()


class Remembers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.memory = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.memory is not None:
            y = y + self.memory
        self.memory = y
        return y.sum()


class Collects(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.fc(x))
        return self.seen[-1].sum()


class CachesMask(Plain):
    """Builds a constant on first use: harmless."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(4, 4).tril()
        return (self.fc(x) * self.mask).sum()


class HidesParameter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.held = [self.fc.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.held[0]).sum()


class Counts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.fc(x).sum()


class WritesInput(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.add_(1)).sum()


class WritesInPlace(Plain):
    """Writes into values of its own: functionalised."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).clone()
        y[:, 0] = 0.0
        y[:, 1] = self.fc(x)[:, 2]
        y[0].mul_(2.0)
        return y.relu_().sum() + torch.tensor(0.5)


class DropsInPlace(Plain):
    """nn.Dropout(inplace=True), a common idiom."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        z = F.dropout(y, 0.25, self.training, inplace=True)
        return (y * z).sum()


class Recurrent(Plain):
    """nn.LSTM keeps its weights in a second list."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, 2, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.fc(x))[0].pow(2).sum()


class Conditional(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (self.fc(x),)).sum()


class TracksInstances(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).pow(2).sum()


class BatchNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).sum()


class Looks(nn.Module):
    """Look tokens up in a table with one more option."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x > 0).long()).sum()


class FunctionalBatchNorm(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.fc(x), None, None, training=True).sum()


class Noise(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) + torch.rand_like(x)).sum()


class ComplexGate(nn.Module):
    """Trains complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn x (B, D)."""
        return (x * self.gate).real.sum()


class NeedsMask(Plain):
    """Makes its default mask only where nobody exports it, as Switch Transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        mask = None if torch.compiler.is_compiling() else torch.ones_like(x)
        return (self.fc(x) * mask[:, :1]).sum()


class Mistake(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.view(3, 5)).sum()


@torch.library.custom_op("autoshard_test::no_backward", mutates_args=())
def no_backward(x: Tensor) -> Tensor:
    """An operator of a third party without registered autograd."""
    return x * 2


@no_backward.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autoshard_test::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    """An operator of a third party without a fake implementation."""
    return x * 2


class ThirdPartyKernel(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return no_backward(self.fc(x)).sum()


class UnknownKernel(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return no_fake(self.fc(x)).sum()


class Nested(nn.Module):
    """Lists of lists, dicts of lists, a slice of a list (case T13)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.towers = nn.ModuleDict(
            {name: nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for name in ("left", "right")}
        )
        self.grid = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x).relu()
        left = self.towers["left"][1](self.towers["left"][0](x))
        for layer in self.towers["right"]:
            x = layer(x)
        return (x + left + self.grid[0][0](x) + self.grid[1][0](x)).sum()


class DropoutBlock(nn.Module):
    """Functional and module dropout of one half each (case T3)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.fc(x), 0.5, training=self.training)
        return self.drop(x).pow(2).mean()
