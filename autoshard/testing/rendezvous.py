"""N virtual ranks in one process: who runs, who waits for whom, and what they exchange.

One thread per rank, but only one runs at a time: it hands over when it has to wait. So runs are
deterministic, and when nobody can run that is a deadlock, found at once. Ranks that disagree on a
collective are told by name; an input that changes while a collective is under way is an error.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from autoshard.diagnostics import RuntimeMismatchError
from autoshard.mesh import Mesh
from autoshard.ops.communicator import Work
from autoshard.runtime.gloo import combine
from autoshard.runtime.work import Clock, Ready, Transfer

CPU = torch.device("cpu")
Members = tuple[int, ...]
Finish = Callable[[list[torch.Tensor], int], torch.Tensor]  # (values by member, own place)


class RankStopped(Exception):
    """Unwinds a virtual rank because another one failed."""


@dataclass
class Collective:
    """One collective: what each member wants, and what each brought."""

    wanted: str
    first: int  # the rank that came first
    taken: int = 0  # members that have their result
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    copies: dict[int, torch.Tensor] = field(default_factory=dict)


class Hub:
    """What all virtual ranks share."""

    def __init__(self, mesh: Mesh, device: torch.device = CPU) -> None:
        """Let rank 0 run first; all compute on ``device``."""
        self.mesh, self.device = mesh, device
        # Each rank sleeps on its own: waking all to let one go on costs N wake-ups a message.
        self._turns = [threading.Semaphore(rank == 0) for rank in range(mesh.world_size)]
        self._turn = 0
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._finished: set[int] = set()
        self.failure: BaseException | None = None
        self.collectives: dict[tuple[Members, int], Collective] = {}
        self.counts: dict[tuple[int, Members], int] = defaultdict(int)
        self.mail: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)

    def enter(self, rank: int) -> None:
        """Block until it is the rank's turn for the first time."""
        self._await_turn(rank)

    def wait(self, rank: int, is_ready: Callable[[], bool], what: str) -> None:
        """Let others run until ``is_ready``; tell a deadlock at once."""
        if is_ready():
            return
        self._waiting[rank] = (is_ready, what)
        self._hand_over()
        self._await_turn(rank)
        del self._waiting[rank]

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """End a rank; its error stops all others."""
        self._finished.add(rank)
        if error is not None and not isinstance(error, RankStopped):
            self._fail(error)
        if self.failure is None:
            self._hand_over()

    def check_empty(self) -> None:
        """Raise if a message was never received, or a collective never waited for."""
        left = [
            f"{len(box)} message(s) from rank {a} to {b}"
            for (a, b, _), box in self.mail.items()
            if box
        ]
        left += [f"{entry.wanted} of ranks {list(g)}" for (g, _), entry in self.collectives.items()]
        if left:
            raise RuntimeMismatchError("ranks finished with messages left over", notes=left)

    def _await_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self.failure is not None:
            raise RankStopped

    def _hand_over(self) -> None:
        size = self.mesh.world_size
        order = ((self._turn + 1 + i) % size for i in range(size))
        able = next((rank for rank in order if self._is_able(rank)), None)
        if able is not None:
            self._turn = able
            self._turns[able].release()
        elif len(self._finished) < size:
            alive = (rank for rank in range(size) if rank not in self._finished)
            self._fail(self._deadlock(tuple(alive)))

    def _is_able(self, rank: int) -> bool:
        if rank in self._finished:
            return False
        return rank not in self._waiting or self._waiting[rank][0]()

    def _deadlock(self, alive: Sequence[int]) -> RuntimeMismatchError:
        lines = [f"rank {rank} waits for {self._waiting[rank][1]}" for rank in alive]
        done = sorted(self._finished)
        lines += [f"rank {rank} has finished" for rank in done]
        return RuntimeMismatchError("deadlock: no virtual rank can go on", notes=lines)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        for turn in self._turns:
            turn.release()


class Rendezvous:
    """The Communicator and Transport of one virtual rank."""

    def __init__(self, hub: Hub, rank: int) -> None:
        """Join ``hub`` as ``rank``."""
        self._hub, self.rank, self.mesh = hub, rank, hub.mesh
        self.device, self.host, self.clock = hub.device, None, Clock()
        self._awaited: set[int] = set()  # buffers of messages under way

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along ``axis``."""
        return self.mesh.index(self.rank, axis)

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``."""
        return self.mesh.size(axis)

    def all_reduce_start(
        self, value: torch.Tensor, axis: str, op: str = "sum", members: Sequence[int] | None = None
    ) -> Work:
        """Reduce over the axis, first to last, or over ``members`` of it."""
        group = self.mesh.group(self.rank, axis)
        if members is not None:
            group = tuple(group[i] for i in members)
        return self._start(f"all_reduce({op})", axis, group, value, lambda p, _: combine(p, op))

    def all_gather_start(self, value: torch.Tensor, axis: str) -> Work:
        """Return the values of all ranks, stacked."""
        group = self.mesh.group(self.rank, axis)
        return self._start("all_gather", axis, group, value, lambda p, _: torch.stack(p))

    def reduce_scatter_start(self, value: torch.Tensor, axis: str) -> Work:
        """Sum ``value`` (size, ...) over the ranks; return this rank's slice."""
        group = self.mesh.group(self.rank, axis)
        if value.shape[0] != len(group):
            raise RuntimeMismatchError(
                f"reduce_scatter over '{axis}' got {value.shape[0]} slices for {len(group)} ranks"
            )
        return self._start(
            "reduce_scatter", axis, group, value, lambda p, me: combine([x[me] for x in p], "sum")
        )

    def broadcast(self, value: torch.Tensor, axis: str, source: int) -> torch.Tensor:
        """Return the value of coordinate ``source``."""
        group = self.mesh.group(self.rank, axis)
        kind = f"broadcast(from {source})"
        return self._start(kind, axis, group, value, lambda p, _: p[source].clone()).wait()

    def transfer_start(self, transfers: Sequence[Transfer]) -> list[Work]:
        """Post messages; a receive's buffer is NaN until it is waited for."""
        return [self._send(t) if t.is_send else self._receive(t) for t in transfers]

    def _send(self, item: Transfer) -> Work:
        peer = self.mesh.group(self.rank, item.axis)[item.peer]
        copy = item.value.clone()
        self._hub.mail[self.rank, peer, item.tag].append(copy)
        return _Sending(self.rank, peer, item.value, copy)

    def _receive(self, item: Transfer) -> Work:
        peer = self.mesh.group(self.rank, item.axis)[item.peer]
        place = item.value.data_ptr()
        if place and place in self._awaited:
            raise RuntimeMismatchError(
                f"rank {self.rank} awaits two messages in one buffer, the second from rank {peer}"
            )
        self._awaited.add(place)
        _poison(item.value)
        return _Receiving(self._hub, self.rank, peer, item, self._awaited)

    def _start(
        self,
        kind: str,
        axis: str,
        group: Members,
        value: torch.Tensor,
        finish: Finish,
    ) -> Work:
        if len(group) == 1:
            return Ready(finish([value], 0))
        number = self._hub.counts[self.rank, group]
        self._hub.counts[self.rank, group] += 1
        dtype = str(value.dtype).removeprefix("torch.")
        wanted = f"{kind} over '{axis}' of {dtype}{list(value.shape)}"
        entry = self._hub.collectives.setdefault((group, number), Collective(wanted, self.rank))
        if entry.wanted != wanted:
            raise RuntimeMismatchError(
                f"rank {self.rank} and rank {entry.first} disagree on collective {number}"
                f" of ranks {list(group)}",
                notes=(
                    f"rank {entry.first} calls {entry.wanted}",
                    f"rank {self.rank} calls {wanted}",
                ),
            )
        entry.values[self.rank], entry.copies[self.rank] = value, value.clone()
        return _Collecting(self._hub, self.rank, group, number, finish)


class _Collecting:
    """A collective under way."""

    def __init__(self, hub: Hub, rank: int, group: Members, number: int, finish: Finish) -> None:
        self._hub, self._rank, self._group, self._number = hub, rank, group, number
        self._finish = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._result is None:
            entry = self._hub.collectives[self._group, self._number]
            what = f"{entry.wanted} with ranks {list(self._group)}"
            self._hub.wait(self._rank, lambda: len(entry.values) == len(self._group), what)
            self._check_unchanged(entry)
            parts = [entry.copies[rank] for rank in self._group]
            self._result = self._finish(parts, self._group.index(self._rank))
            entry.taken += 1
            if entry.taken == len(self._group):
                del self._hub.collectives[self._group, self._number]
        return self._result

    def _check_unchanged(self, entry: Collective) -> None:
        value, copy = entry.values[self._rank], entry.copies[self._rank]
        if not torch.equal(torch.nan_to_num(value), torch.nan_to_num(copy)):
            raise RuntimeMismatchError(
                f"rank {self._rank} changed the input of {entry.wanted} before waiting for it"
            )


@dataclass(frozen=True)
class _Sending:
    """A message under way: what it is read from must stay as it is."""

    rank: int
    peer: int
    value: torch.Tensor
    copy: torch.Tensor

    def wait(self) -> torch.Tensor:
        if not torch.equal(torch.nan_to_num(self.value), torch.nan_to_num(self.copy)):
            raise RuntimeMismatchError(
                f"rank {self.rank} changed what it sends to rank {self.peer} before it was sent"
            )
        return self.value


class _Receiving:
    """A message that is expected."""

    def __init__(self, hub: Hub, rank: int, peer: int, item: Transfer, awaited: set[int]) -> None:
        self._hub, self._rank, self._peer, self._item = hub, rank, peer, item
        self._awaited = awaited
        self._is_done = False

    def wait(self) -> torch.Tensor:
        if not self._is_done:
            box = self._hub.mail[self._peer, self._rank, self._item.tag]
            shape = list(self._item.value.shape)
            what = f"message {self._item.tag} of {shape} from rank {self._peer}"
            self._hub.wait(self._rank, lambda: bool(box), what)
            sent = box.popleft()
            self._check(sent)
            self._item.value.copy_(sent)
            self._awaited.discard(self._item.value.data_ptr())
            self._is_done = True
        return self._item.value

    def _check(self, sent: torch.Tensor) -> None:
        want = self._item.value
        if sent.shape != want.shape or sent.dtype != want.dtype:
            raise RuntimeMismatchError(
                f"rank {self._peer} sent {sent.dtype}{list(sent.shape)}, rank {self._rank}"
                f" expects {want.dtype}{list(want.shape)}"
            )


def _poison(value: torch.Tensor) -> None:
    value.fill_(float("nan") if value.is_floating_point() else True)
