"""Find in a captured graph which weights tensor parallelism can split, by following the values.

Each product with a weight is tried as a column split: the rule table says how what follows lies.
The trial succeeds where everything it touches stays split until other products sum it up again
(their weights are then split by rows), as in Megatron-LM's pairs around an activation or an
attention. What must be split along with it (keys and values, a gate) joins the trial. No names are
read. A proposal is a draft for people: any rules are right for the compiler, these are cheap too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch
from torch.fx import Node

from autoshard.ir.graph_function import BATCH, PARAM
from autoshard.ir.node_info import info
from autoshard.ir.placement import REPLICATE, Partial, Placement, Replicate, Shard, normalize
from autoshard.ir.program import Program
from autoshard.ir.rules.call import Choice, call_of, shapes_of, tensor_inputs
from autoshard.ir.rules.table import choose
from autoshard.model_facts import Proposal, Split, Whole

aten = torch.ops.aten
# operator -> positions of weight and bias, and the weight's output dimension
PRODUCTS = {
    aten.linear.default: (1, 2, 0),
    aten.addmm.default: (2, 0, 1),
    aten.mm.default: (1, None, 1),
    aten.matmul.default: (1, None, 1),
}
WEIGHS = (aten.scaled_dot_product_attention.default, aten.softmax.int, aten._softmax.default)
PAD = 128  # rows: the multiple that padded vocabularies have per rank, by custom


class _Dropped(Exception):
    """Say why a trial fails."""


class _Packed(Exception):
    """Say in which parts the outputs of the column weights are taken apart."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        super().__init__(f"packed {parts}")
        self.parts = parts


def propose(program: Program, size: int) -> Proposal:
    """Return which weights of a captured program to split over ``size`` ranks, and which not."""
    return _Proposing(_Graph(program, size)).run()


@dataclass(frozen=True)
class _Weight:
    """A matrix that products read directly."""

    fqn: str
    node: Node
    shape: tuple[int, int]
    readers: tuple[Node, ...]
    outputs: int  # which dimension

    @property
    def extent(self) -> int:
        """Return the number of outputs."""
        return self.shape[self.outputs]


class _Graph:
    """One forward graph with what trials ask of it."""

    def __init__(self, program: Program, size: int) -> None:
        self.program, self.size = program, size
        self.order = {node: i for i, node in enumerate(program.forward.graph.nodes)}
        self.before: dict[Node, int] = {}  # what a node depends on, as bits
        for node in self.order:
            bits = 0
            for source in node.all_input_nodes:
                bits |= self.before[source] | 1 << self.order[source]
            self.before[node] = bits
        self.leaves = set(program.forward.named(BATCH).values())
        self.batch = sum(1 << self.order[node] for node in self.leaves)
        self.params = {node: fqn for fqn, node in program.forward.named(PARAM).items()}
        self.weights = {w.fqn: w for w in self._find_weights()}
        self.read_by = {node: w for w in self.weights.values() for node in w.readers}
        self.tables = [node for node in self.params if _is_table(node)]

    def _find_weights(self) -> Iterator[_Weight]:
        for node, fqn in self.params.items():
            readers = tuple(u for u in node.users if _weight_of(u) is node)
            shape = shapes_of(node)[0]
            if readers and len(shape) == 2:
                outputs = {PRODUCTS[reader.target][2] for reader in readers}
                if len(outputs) == 1:
                    yield _Weight(fqn, node, shape, readers, outputs.pop())

    def bias_of(self, reader: Node) -> Node | None:
        """Return the bias parameter that a product adds."""
        place = PRODUCTS[reader.target][1]
        bias = reader.args[place] if place is not None and place < len(reader.args) else None
        return bias if bias in self.params else None

    def depends(self, node: Node, on: Node) -> bool:
        """Tell whether ``node`` is computed from ``on``."""
        return bool(self.before[node] >> self.order[on] & 1)

    def embeds_batch(self, node: Node) -> bool:
        """Tell whether a look-up in a table is of the batch: a table of positions is no stream."""
        is_look_up = node.target is aten.embedding.default and node.args[0] in self.params
        return is_look_up and bool(
            self.before[node.args[1]] & self.batch or node.args[1] in self.leaves
        )

    def sources(self, value: Node) -> set[Node]:
        """Return the products and look-ups that ``value`` comes from, without passing them."""
        found, pending, seen = set(), [value], set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.read_by or self.embeds_batch(node):
                found.add(node)
            else:
                pending += node.all_input_nodes
        return found


def _is_table(param: Node) -> bool:
    """Tell whether look-ups read a parameter, and nothing else but products."""
    others = [u for u in param.users if _weight_of(u) is not param]
    return bool(others) and all(u.target is aten.embedding.default for u in others)


def _weight_of(node: Node) -> Node | None:
    if node.op != "call_function" or node.target not in PRODUCTS:
        return None
    place = PRODUCTS[node.target][0]
    return node.args[place] if place < len(node.args) else None


@dataclass
class _Trial:
    """Follow what a set of column weights does until it is summed up, or fails."""

    graph: _Graph
    columns: dict[str, tuple[int, ...]]  # weight -> parts of its outputs
    head: bool = False
    rows: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    attends: bool = False
    env: dict[Node, tuple[Placement, ...]] = field(default_factory=dict)
    roots: dict[Node, Node] = field(default_factory=dict)
    heap: list[tuple[int, int, Node]] = field(default_factory=list)
    ends_in_loss: bool = False

    def run(self) -> None:
        """Walk in graph order; raise _Dropped or _Packed."""
        for fqn, parts in self.columns.items():
            weight = self.graph.weights[fqn]
            blocks = parts if len(parts) > 1 or self.head else ()
            shard = normalize(Shard(weight.outputs, blocks), weight.extent)
            self.env[weight.node] = (shard,)
            for reader in weight.readers:
                bias = self.graph.bias_of(reader)
                if bias is not None:
                    self.env[bias] = (normalize(Shard(0, blocks), weight.extent),)
                self.roots[reader] = reader
                self.push(reader)
        while self.heap:
            _, _, node = heappop(self.heap)
            self.visit(node)

    def push(self, node: Node) -> None:
        """Queue a reader of a split value."""
        entry = (self.graph.order[node], 0, node)
        if entry not in self.heap:
            heappush(self.heap, entry)

    def visit(self, node: Node) -> None:
        """Place one call's outputs."""
        if node.op == "output":
            raise _Dropped("its outputs leave the model")
        inputs = tensor_inputs(node)
        split = [n for n in inputs if self.is_split(n)]
        self.roots.setdefault(node, next((self.roots[n] for n in split if n in self.roots), node))
        if node.target is operator.getitem:
            self.place(node, (self.env[node.args[0]][node.args[1]],))
            return
        if any(len(self.env.get(n, ())) > 1 for n in inputs):
            raise _Dropped(f"'{node.target}' reads several values at once")
        self.split_rows(node)
        ins = tuple(self.env.get(n, (REPLICATE,))[0] for n in inputs)
        choice = choose(call_of(node, self.graph.size), ins)
        if choice.instead == "vocab_cross_entropy" and self.head:
            self.ends_in_loss = True
            return
        self.check(node, ins, choice)
        self.place(node, choice.outs)

    def split_rows(self, node: Node) -> None:
        """Split a product's weight by rows where its input is split along what is summed."""
        weight = self.graph.read_by.get(node)
        if weight is None or weight.fqn in self.columns:
            return
        place = 1 if node.target is aten.addmm.default else 0
        held = self.env.get(node.args[place], (REPLICATE,))[0]
        if isinstance(held, Shard) and held.dim == len(shapes_of(node.args[place])[0]) - 1:
            self.rows.add(weight.fqn)
            self.env[weight.node] = (Shard(1 - weight.outputs, held.blocks),)

    def check(self, node: Node, ins: tuple[Placement, ...], choice: Choice) -> None:
        """Refuse a choice that moves activations; ask for what must be split along."""
        if choice.refusal == "packed":
            raise _Packed(_parts(node, self.graph.size))
        if choice.refusal == "heads":
            parts = _taken_apart(node, self.graph.size)
            if parts:
                raise _Packed(parts)
            raise _Dropped(f"its heads don't divide by {self.graph.size} ({info(node).source})")
        for value, have, want in zip(tensor_inputs(node), ins, choice.wants, strict=True):
            if isinstance(have, Shard) and have != want:
                raise _Dropped(f"'{_short(node)}' needs it whole ({info(node).source})")
            if isinstance(have, Replicate) and isinstance(want, Shard):
                self.ask(value, node)
        self.attends |= node.target in WEIGHS

    def ask(self, value: Node, reader: Node) -> None:
        """Note the products that ``value`` comes from; refuse what the split weights read too."""
        root = self.roots[reader]
        for source in self.graph.sources(value):
            if self.graph.depends(root, source):
                raise _Dropped(f"it is joined with the stream it reads ({info(reader).source})")
            weight = self.graph.read_by.get(source)
            if weight is not None and weight.fqn not in self.columns:
                self.asked.add(weight.fqn)

    def place(self, node: Node, outs: tuple[Placement, ...]) -> None:
        """Record the outputs and go on where one is split."""
        kept = tuple(REPLICATE if isinstance(p, Partial) else p for p in outs)
        if any(isinstance(p, Partial) for p in outs) and node not in self.graph.read_by:
            self.check_sum(node)
        self.env[node] = kept
        if any(isinstance(p, Shard) for p in kept):
            for user in node.users:
                self.push(user)

    def check_sum(self, node: Node) -> None:
        """Allow sums over the ranks that are small beside what they sum: the norm of a row."""
        largest = max(n.meta["val"].numel() for n in tensor_inputs(node))
        if node.meta["val"].numel() * self.graph.size > largest:
            raise _Dropped(f"'{_short(node)}' sums it over the ranks ({info(node).source})")

    def is_split(self, node: Node) -> bool:
        """Tell whether some output of a node is split."""
        return any(isinstance(p, Shard) for p in self.env.get(node, ()))


def _short(node: Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _parts(node: Node, size: int) -> tuple[int, ...]:
    """Return the lengths of the pieces that the readers of a packed value take."""
    (x,) = tensor_inputs(node)
    if node.target in (aten.select.int, aten.unbind.int):
        raise _Dropped(f"single places of it are read ({info(node).source})")
    if node.target not in (aten.slice.Tensor, aten.narrow.default):
        dim = node.args[2] if len(node.args) > 2 else -1
        parts = tuple(shape[dim] for shape in shapes_of(node))
    else:
        dim = node.args[1]
        cuts = {u.args[2]: shapes_of(u)[0][dim] for u in x.users if u.target is node.target}
        parts = tuple(length for _, length in sorted(cuts.items()))
    if any(part % size for part in parts):
        raise _Dropped(f"its parts {list(parts)} don't divide by {size} ({info(node).source})")
    return parts


def _taken_apart(node: Node, size: int) -> tuple[int, ...]:
    """Return equal parts where a reshape first takes the parts of a packed value apart."""
    (x,) = tensor_inputs(node)
    before, after = shapes_of(x)[0], shapes_of(node)[0]
    tail = after[len(before) - 1 :]
    fits = len(tail) > 2 and tail[0] <= 4 and tail[1] % size == 0
    return (before[-1] // tail[0],) * tail[0] if fits else ()


class _Proposing:
    """Try every weight in graph order."""

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph
        self.columns: dict[str, tuple[int, ...]] = {}
        self.rows: dict[str, str] = {}
        self.why: dict[str, str] = {}
        self.dropped: dict[str, str] = {}
        self.vocab: list[Split] = []

    def run(self) -> Proposal:
        self.split_vocabulary()
        taken = {split.param for split in self.vocab}
        first = {fqn: self.graph.order[w.readers[0]] for fqn, w in self.graph.weights.items()}
        for fqn in sorted(first, key=first.__getitem__):
            if fqn not in self.columns and fqn not in self.rows and fqn not in taken:
                self.attempt(fqn)
        return self.result()

    def split_vocabulary(self) -> None:
        """Split the largest table of embeddings, and the head of the same height."""
        rows = max((shapes_of(node)[0][0] for node in self.graph.tables), default=0)
        heads = [w for w in self.graph.weights.values() if rows and w.extent == rows]
        held = {w.fqn: self.splits_loss(w) for w in heads}
        for node in self.graph.tables:
            fqn = self.graph.params[node]
            if shapes_of(node)[0][0] == rows and held.get(fqn, True):
                self.vocab.append(self.vocabulary(fqn, rows))
        named = {split.param for split in self.vocab}
        for weight in heads:
            if held[weight.fqn] and weight.fqn not in named:
                self.vocab.append(self.vocabulary(weight.fqn, rows))

    def splits_loss(self, weight: _Weight) -> bool:
        """Tell whether the logits stay split up to the cross entropy."""
        step = PAD * self.graph.size
        padded = -(-weight.extent // step) * step
        blocks = () if weight.extent % self.graph.size == 0 else (padded,)
        trial = _Trial(self.graph, {weight.fqn: blocks}, head=True)
        try:
            trial.run()
        except (_Dropped, _Packed) as error:
            self.dropped[weight.fqn] = str(error)
            return False
        return trial.ends_in_loss and not trial.rows

    def vocabulary(self, fqn: str, rows: int) -> Split:
        """Return the split of a table or a head by vocabulary."""
        pad = 0 if rows % self.graph.size == 0 else PAD
        return Split(fqn, "vocab", pad=pad, why="vocabulary")

    def attempt(self, fqn: str) -> None:
        """Try one weight as a column, with what it asks for; note why not."""
        columns: dict[str, tuple[int, ...]] = {fqn: ()}
        for _ in range(8):
            trial = _Trial(self.graph, columns)
            try:
                trial.run()
                self.check(trial)
            except _Packed as packed:
                if not self.repack(columns, packed.parts):
                    self.dropped[fqn] = f"its outputs are taken apart as {list(packed.parts)}"
                    return
                continue
            except _Dropped as reason:
                self.dropped[fqn] = str(reason)
                return
            if not trial.asked:
                self.accept(trial)
                return
            columns.update(dict.fromkeys(trial.asked, ()))
        self.dropped[fqn] = "it depends on too much else"

    def repack(self, columns: dict[str, tuple[int, ...]], parts: tuple[int, ...]) -> bool:
        """Give the parts to the column whose outputs they fill; False when none is left."""
        for fqn, known in columns.items():
            if not known and sum(parts) == self.graph.weights[fqn].extent:
                columns[fqn] = parts
                return True
        return False

    def check(self, trial: _Trial) -> None:
        """Refuse a trial that ends nowhere or takes what is placed already."""
        taken = {split.param for split in self.vocab} | set(self.columns) | set(self.rows)
        if trial.rows & taken or set(trial.columns) & taken or trial.asked & taken:
            raise _Dropped("its neighbours are split in another way")
        if not trial.rows:
            raise _Dropped("nothing sums it up again")

    def accept(self, trial: _Trial) -> None:
        """Keep the weights of a trial."""
        why = "attention" if trial.attends else "elementwise"
        self.columns.update(trial.columns)
        self.rows.update(dict.fromkeys(trial.rows, why))
        self.why.update(dict.fromkeys(trial.columns, why))

    def result(self) -> Proposal:
        splits = list(self.vocab)
        splits += [Split(f, "colwise", parts, why=self.why[f]) for f, parts in self.columns.items()]
        splits += [Split(fqn, "rowwise", why=why) for fqn, why in self.rows.items()]
        order = {fqn: i for i, fqn in enumerate(spec.fqn for spec in self.graph.program.params)}
        found = {split.param for split in splits}
        whole = [Whole(fqn, why) for fqn, why in self.dropped.items() if fqn not in found]
        return Proposal(
            tuple(sorted(splits, key=lambda s: order[s.param])),
            tuple(sorted(whole, key=lambda w: order[w.param])),
        )
