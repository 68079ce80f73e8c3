"""Collectives of one axis on gloo, composed of messages.

Gloo's own reduce-scatter is an all-reduce underneath and moves twice the bytes. Here each rank
sends every other one just its part, and sums what it receives in rank order: so results are equal
bit for bit on all ranks, from run to run, and in lock step. Two ranks have one order, so they leave
their sums to gloo, whose thread adds while this one computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from autoshard.ops.communicator import DIRECT_BYTES, Work
from autoshard.runtime.nccl import OPS
from autoshard.runtime.work import (
    Clock,
    Delivery,
    Pending,
    Started,
    Transfer,
    describe,
    lost,
    named,
)

COMBINE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum}
ADDED_BY_GLOO = frozenset({torch.float32, torch.float64})  # as torch adds: exactly rounded
TAGS = 1 << 20  # collectives under way at once on one axis are fewer by far

Message = tuple[int, torch.Tensor]  # (peer, buffer)


def combine(
    parts: Sequence[torch.Tensor], op: str, scratch: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the parts reduced from first to last, in ``scratch`` or a new tensor.

    ``scratch`` may be one of the first two parts.
    """
    if len(parts) == 1:
        return parts[0].clone()
    result = COMBINE[op](parts[0], parts[1], out=scratch)
    for part in parts[2:]:
        COMBINE[op](result, part, out=result)
    return result


class GlooAxis:
    """One rank's end of an axis."""

    def __init__(self, name: str, group: dist.ProcessGroup, index: int, clock: Clock) -> None:
        """Use ``group``, whose member number ``index`` this rank is."""
        self.name, self._group, self._index = name, group, index
        self._all = tuple(range(dist.get_world_size(group)))
        self._clock, self._tags = clock, itertools.count()

    def add_subset(self, members: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """Accept a group of some members; messages need none of their own."""

    def all_reduce(self, value: torch.Tensor, op: str, members: tuple[int, ...] | None) -> Work:
        """Start a reduction over all ranks of the axis, or over ``members``."""
        members, value = members or self._all, value.contiguous()
        nbytes = value.numel() * value.element_size()
        if members == self._all and len(members) == 2 and value.dtype in ADDED_BY_GLOO:
            return self._by_gloo(value, op)
        if len(members) == 2 or nbytes <= DIRECT_BYTES:
            return self._one_round(value, op, members)
        return self._two_rounds(value, op, members)

    def all_gather(self, value: torch.Tensor) -> Work:
        """Start gathering the values of all ranks on a new first dimension."""
        started, parts = self._exchange(value.contiguous(), self._all, self._tag())
        return self._pending(started, lambda: parts, "all_gather", value)

    def reduce_scatter(self, value: torch.Tensor) -> Work:
        """Start summing ``value`` (size, ...); the result is this rank's slice."""
        started, parts = self._deal(value.contiguous(), self._all, self._tag())
        received = parts[self._index == 0]  # one of the first two; the sum may overwrite it
        return self._pending(
            started, lambda: combine(parts, "sum", received), "reduce_scatter", value
        )

    def broadcast(self, value: torch.Tensor, source: int) -> Work:
        """Start handing the value of ``source`` to all ranks of the axis."""
        tag, value = self._tag(), value.contiguous()
        if self._index == source:
            out = value
            started = self._post([(p, value) for p in self._all if p != source], [], tag)
        else:
            out = torch.empty_like(value)
            started = self._post([], [(source, out)], tag)
        return self._pending(started, lambda: out, "broadcast", value)

    def transfer(self, transfers: Sequence[Transfer]) -> list[Work]:
        """Post messages, one Work for each; their tags pair them, whatever the order."""
        # The group itself is asked: torch.distributed's functions take half as long again.
        group = self._group
        works: list[Work] = []
        for item in transfers:
            try:
                if item.is_send:
                    started = group.send([item.value], item.peer, item.tag)
                    self._clock.sent += item.value.nbytes
                else:
                    started = group.recv([item.value], item.peer, item.tag)
            except RuntimeError as error:
                raise lost(describe(item), error) from error
            works.append(Delivery(started, item, self._clock))
        return works

    def _by_gloo(self, value: torch.Tensor, op: str) -> Work:
        """Start gloo's own reduction of a copy."""
        out = value.clone()
        with named(f"all_reduce over axis '{self.name}'"):
            started = dist.all_reduce(out, OPS[op], group=self._group, async_op=True)
        self._clock.sent += value.nbytes
        return self._pending([started] if started else [], lambda: out, "all_reduce", value)

    def _one_round(self, value: torch.Tensor, op: str, members: tuple[int, ...]) -> Work:
        """Send the whole value to all others and sum what they send."""
        me = members.index(self._index)
        parts = [value if i == me else torch.empty_like(value) for i in range(len(members))]
        others = [(peer, parts[i]) for i, peer in enumerate(members) if i != me]
        started = self._post([(peer, value) for peer, _ in others], others, self._tag())
        scratch = parts[me == 0]  # received, and one of the first two
        return self._pending(started, lambda: combine(parts, op, scratch), "all_reduce", value)

    def _two_rounds(self, value: torch.Tensor, op: str, members: tuple[int, ...]) -> Work:
        """Deal out and sum parts, then exchange the sums when they are waited for.

        Each byte crosses twice instead of n - 1 times.
        """
        count, length = len(members), value.numel()
        chunk = -(-length // count)
        padded = value.new_zeros(count * chunk)
        padded[:length].copy_(value.view(-1))
        # The tag of the second round is taken now: ranks need not wait in the same order.
        tag, second_tag = self._tag(), self._tag()
        first, parts = self._deal(padded.view(count, chunk), members, tag)

        def finish() -> torch.Tensor:
            second, sums = self._exchange(combine(parts, op), members, second_tag)
            for started in second:
                started.wait()
            return sums.view(-1)[:length].view(value.shape)

        return self._pending(first, finish, "all_reduce", value)

    def _exchange(
        self, value: torch.Tensor, members: tuple[int, ...], tag: int
    ) -> tuple[list[Started], torch.Tensor]:
        """Send ``value`` to all; the result (members, ...) fills with theirs."""
        me = members.index(self._index)
        parts = value.new_empty((len(members), *value.shape))
        parts[me].copy_(value)
        others = [(peer, i) for i, peer in enumerate(members) if i != me]
        outgoing = [(peer, parts[me]) for peer, _ in others]
        return self._post(outgoing, [(peer, parts[i]) for peer, i in others], tag), parts

    def _deal(
        self, value: torch.Tensor, members: tuple[int, ...], tag: int
    ) -> tuple[list[Started], list[torch.Tensor]]:
        """Send each member its slice of ``value``; the result fills with slices for this rank."""
        me = members.index(self._index)
        parts = [value[me] if i == me else torch.empty_like(value[me]) for i in range(len(members))]
        others = [(peer, i) for i, peer in enumerate(members) if i != me]
        outgoing = [(peer, value[i]) for peer, i in others]
        return self._post(outgoing, [(peer, parts[i]) for peer, i in others], tag), parts

    def _post(
        self, outgoing: Iterable[Message], incoming: Iterable[Message], tag: int
    ) -> list[Started]:
        with named(f"message over axis '{self.name}'"):
            posted = [
                dist.irecv(buffer, group=self._group, group_src=peer, tag=tag)
                for peer, buffer in incoming
            ]
            for peer, buffer in outgoing:
                posted.append(dist.isend(buffer, group=self._group, group_dst=peer, tag=tag))
                self._clock.sent += buffer.nbytes
        return [started for started in posted if started is not None]

    def _pending(
        self,
        started: list[Started],
        finish: Callable[[], torch.Tensor],
        kind: str,
        value: torch.Tensor,
    ) -> Pending:
        what = f"{kind} of {list(value.shape)} over axis '{self.name}'"
        return Pending(started, finish, self._clock, what)

    def _tag(self) -> int:
        return next(self._tags) % TAGS
