"""Run a lowered schedule with symbols for tensors: an oracle that shares no code with the proof.

Ranks are blocking machines without buffers: a SEND ends when its partner stands at the RECV of
the same message. The outcome lists what each stage accumulated, so two schedules with equal
outcomes train the same.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from autoshard.schedule.action import RECVS, SENDS, Action, Kind
from autoshard.schedule.schedule import Schedule

Symbol = tuple  # an operation and the symbols it read
Place = tuple[str, int, int | None]  # "act" or "grad" or "saved", stage, micro-batch


class Fault(Exception):
    """Say what a rank could not do."""


@dataclass
class Outcome:
    """Hold what the run leaves behind; `fault` says why it stopped early."""

    fault: str = ""
    gradients: dict[int, list[Symbol]] = field(default_factory=lambda: defaultdict(list))
    reduced: dict[int, list[Symbol]] = field(default_factory=dict)
    gathers: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    left_over: list[Place] = field(default_factory=list)


def run_symbols(schedule: Schedule, *, is_sharded: bool) -> Outcome:
    """Return the outcome of a lowered schedule; `is_sharded` means that UNSHARD must come first."""
    machine = _Machine(schedule, is_sharded)
    try:
        machine.run()
    except Fault as fault:
        machine.outcome.fault = str(fault)
    return machine.outcome


class _Machine:
    """Step all ranks until all are done or none can go on."""

    def __init__(self, schedule: Schedule, is_sharded: bool) -> None:
        self.schedule, self.is_sharded = schedule, is_sharded
        self.at = [0] * schedule.num_ranks
        self.held: list[dict[Place, Symbol]] = [{} for _ in schedule.ranks]
        self.outgoing: list[dict[Place, Symbol]] = [{} for _ in schedule.ranks]
        self.outcome = Outcome()

    def run(self) -> None:
        """Run to the end; raise Fault where a rank is stuck or lacks what it reads."""
        moved = True
        while moved:
            moved = False
            for rank in range(self.schedule.num_ranks):
                while self._step(rank):
                    moved = True
        for rank, row in enumerate(self.schedule.ranks):
            if self.at[rank] < len(row):
                raise Fault(f"rank {rank} is stuck at {row[self.at[rank]]}")
        stores = (*self.held, *self.outgoing)
        self.outcome.left_over = sorted(place for store in stores for place in store)

    def _current(self, rank: int) -> Action | None:
        row = self.schedule.ranks[rank]
        return row[self.at[rank]] if self.at[rank] < len(row) else None

    def _step(self, rank: int) -> bool:
        action = self._current(rank)
        if action is None or action.kind in RECVS:
            return False  # a receive is done by its sender
        if action.kind in SENDS:
            return self._send(rank, action)
        self._do(rank, action)
        self.at[rank] += 1
        return True

    def _send(self, rank: int, action: Action) -> bool:
        placement = self.schedule.stage_to_rank
        if not 0 <= action.peer_stage < len(placement) or placement[action.stage] != rank:
            raise Fault(f"rank {rank} can't do {action}")
        peer = placement[action.peer_stage]
        there = self._current(peer)
        if peer == rank or there is None or there.kind not in RECVS:
            return False
        source = there.peer_stage
        if not 0 <= source < len(placement) or placement[source] != rank:
            return False  # it waits for somebody else
        if there != action.partner:
            raise Fault(f"rank {rank} does {action} where rank {peer} does {there}")
        word = "act" if action.kind is Kind.SEND_F else "grad"
        symbol = _take(self.outgoing[rank], (word, action.stage, action.microbatch), action)
        _put(self.held[peer], (word, there.stage, there.microbatch), symbol, there)
        self.at[rank] += 1
        self.at[peer] += 1
        return True

    def _do(self, rank: int, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        if not 0 <= stage < self.schedule.num_stages:
            raise Fault(f"{action}: no such stage")
        if self.schedule.stage_to_rank[stage] != rank:
            raise Fault(f"rank {rank} has no stage {stage}")
        if number is not None and not 0 <= number < self.schedule.num_microbatches:
            raise Fault(f"{action}: no such micro-batch")
        if action.kind in (Kind.UNSHARD, Kind.RESHARD):
            self.outcome.gathers[stage].append(action.kind.value)
        elif action.kind is Kind.REDUCE_GRAD:
            if stage in self.outcome.reduced:
                raise Fault(f"{action} again")
            self.outcome.reduced[stage] = list(self.outcome.gradients[stage])
        elif action.kind is Kind.B:
            self._input_gradient(rank, action)
            self._weight_gradient(rank, action)
        elif action.kind is Kind.F:
            self._forward(rank, action)
        elif action.kind is Kind.I:
            self._input_gradient(rank, action)
        else:
            self._weight_gradient(rank, action)

    def _forward(self, rank: int, action: Action) -> None:
        self._need_parameters(action)
        stage, number = action.stage, action.microbatch
        read: Symbol = ("batch", number)
        if stage > 0:
            read = _take(self.held[rank], ("act", stage, number), action)
        symbol = ("F", stage, number, read)
        _put(self.held[rank], ("saved", stage, number), symbol, action)
        self._pass_on(rank, "act", stage + 1, symbol, action)

    def _input_gradient(self, rank: int, action: Action) -> None:
        self._need_parameters(action)
        stage, number = action.stage, action.microbatch
        saved = _take(self.held[rank], ("saved", stage, number), action)
        read: Symbol = ("loss", number)
        if stage + 1 < self.schedule.num_stages:
            read = _take(self.held[rank], ("grad", stage, number), action)
        symbol = ("I", stage, number, saved, read)
        _put(self.held[rank], ("weight", stage, number), symbol, action)
        self._pass_on(rank, "grad", stage - 1, symbol, action)

    def _weight_gradient(self, rank: int, action: Action) -> None:
        self._need_parameters(action)
        place = ("weight", action.stage, action.microbatch)
        self.outcome.gradients[action.stage].append(_take(self.held[rank], place, action))

    def _need_parameters(self, action: Action) -> None:
        gathers = self.outcome.gathers.get(action.stage)
        if self.is_sharded and (not gathers or gathers[-1] == Kind.RESHARD.value):
            raise Fault(f"{action} reads parameters that are not gathered")

    def _pass_on(self, rank: int, word: str, target: int, symbol: Symbol, action: Action) -> None:
        if not 0 <= target < self.schedule.num_stages:
            return
        if self.schedule.stage_to_rank[target] == rank:
            _put(self.held[rank], (word, target, action.microbatch), symbol, action)
        else:
            _put(self.outgoing[rank], (word, action.stage, action.microbatch), symbol, action)


def _take(store: dict[Place, Symbol], place: Place, action: Action) -> Symbol:
    if place not in store:
        raise Fault(f"{action} reads {place}, which isn't there")
    return store.pop(place)


def _put(store: dict[Place, Symbol], place: Place, symbol: Symbol, action: Action) -> None:
    if place in store:
        raise Fault(f"{action} writes {place}, which is there already")
    store[place] = symbol
