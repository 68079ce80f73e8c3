"""Refuse optimizers whose update of one element depends on others: on shards they'd be wrong."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard.diagnostics import NotExecutableError

ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# Words in the names of optimizers that factor, precondition or normalize by whole tensors.
WHOLE_TENSOR = (
    "muon",
    "adafactor",
    "lbfgs",
    "lamb",
    "lars",
    "shampoo",
    "soap",
    "galore",
    "kfac",
    "novograd",
    "apollo",
)


class OptimizerCheck:
    """Looks at every optimizer before its step, as long as the engine lives."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        ranks: int,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        """Watch steps on any of ``parameters``; on one rank every optimizer is right.

        ``on_step`` is called before each step.
        """
        self._ranks, self._on_step = ranks, on_step
        self._parameters = tuple(parameters)  # kept alive, so that their ids stay theirs
        self._ids = {id(parameter) for parameter in self._parameters}
        self._passed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        own = weakref.ref(self)
        # A weak reference: torch keeps the hook for good, the engine may go.
        self.handle = register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: (own() or _ignore)(optimizer)
        )

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if ``optimizer`` would be silently wrong on shards of our parameters."""
        if not self._holds_ours(optimizer):
            return
        if self._on_step is not None:
            self._on_step()
        if optimizer in self._passed:
            return
        if self._ranks > 1:
            refuse_whole_tensor(type(optimizer))
        self._passed.add(optimizer)

    def states(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield what optimizers that made a step on our parameters keep of each."""
        for optimizer in self._passed:
            for parameter in self._parameters:
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, torch.Tensor):
                        yield parameter, value

    def _holds_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        held = (p for group in optimizer.param_groups for p in group["params"])
        return any(id(parameter) in self._ids for parameter in held)


def refuse_whole_tensor(kind: type) -> None:
    """Raise for an optimizer known to need whole tensors; warn of one that nobody knows."""
    names = [cls.__name__.lower() for cls in kind.__mro__]
    if any(word in name for word in WHOLE_TENSOR for name in names):
        raise NotExecutableError(
            f"optimizer '{kind.__name__}' needs whole tensors; each rank holds shards only:"
            " its updates would be silently wrong",
            help="use an elementwise optimizer of torch.optim: AdamW, Adam, SGD, RMSprop, Adagrad",
        )
    if kind not in ELEMENTWISE:
        warnings.warn(
            f"optimizer '{kind.__name__}' isn't known to autoshard: it is right on shards only if"
            " its update of each element depends on that element alone",
            stacklevel=2,
        )


def _ignore(optimizer: torch.optim.Optimizer) -> None:
    """Check nothing: the engine is gone."""
