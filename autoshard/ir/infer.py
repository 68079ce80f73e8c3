"""Infer placements forward through one graph by the rule table, converting nothing."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import torch
from torch.fx import Node

from autoshard.ir.decide import Axis, Question, Value
from autoshard.ir.graph_function import ACCUMULATED, FLAT, FLAT_GRAD, GraphFunction
from autoshard.ir.masks import mask_of, mask_problem
from autoshard.ir.node_info import info, origin, val
from autoshard.ir.params import Flat, ParamSpec
from autoshard.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from autoshard.ir.program import Program
from autoshard.ir.rules.call import Choice, Shape, shapes_of, tensor_inputs
from autoshard.ir.uniform import Uniformity
from autoshard.ir.user_line import place_of
from autoshard.ops import collectives

_MISFITS = (RuntimeError, IndexError, ValueError)  # what torch raises where shapes don't fit


@dataclass
class Inference:
    """The placements of one graph's values along one axis."""

    program: Program
    axis: Axis
    env: dict[Node, Value | tuple[Value, ...]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    unproven: Counter[str] = field(default_factory=Counter)  # operators without a rule
    unknown: Counter[str] = field(default_factory=Counter)  # that read a value of no placement
    flat: dict[Node, str] = field(default_factory=dict)  # flat buckets, by node
    origins: dict[Node, Node] = field(default_factory=dict)  # saved input -> its node in F
    readings: dict[Node, tuple[Placement, ...]] = field(default_factory=dict)  # of unsure values
    came_from: dict[Node, dict[Placement, Placement]] = field(default_factory=dict)  # by reading
    uniformity: Uniformity = field(init=False)

    def __post_init__(self) -> None:
        split = (leaf.shape[0] for leaf in self.program.leaves if leaf.is_split)
        self.uniformity = Uniformity(next(split, 1), self.origins)

    def walk(self, function: GraphFunction) -> None:
        """Infer every call in order; the placements of the placeholders are in ``env``."""
        for node in function.graph.find_nodes(op="placeholder"):
            self.env.setdefault(node, None)
        for kind in (FLAT, FLAT_GRAD, ACCUMULATED):
            self.flat |= {node: name for name, node in function.named(kind).items()}
        for node in function.graph.nodes:
            if node.op == "call_function" and node.target is not collectives.release:
                self.env[node] = self._infer(node)
                self._check_waited(node)

    def _check_waited(self, node: Node) -> None:
        """Refuse a reader of what a collective has only started: it may not be there yet."""
        if node.target not in collectives.STARTS:
            return
        for user in node.users:
            if user.target is not collectives.wait:
                self._wrong(user, f"reads %{node.name}, a collective that was only started")

    def _infer(self, node: Node) -> Value | tuple[Value, ...]:
        if node.target is operator.getitem:
            return self._item(node)
        if node.target is collectives.view_at:
            return self._param_view(node)
        if node.target is collectives.pack:
            return self._packed(node)
        ins = tuple(self.env[n] for n in tensor_inputs(node))
        count = len(shapes_of(node))
        if any(value is None for value in ins):
            if not self._passes_on_bucket(node):
                self.unknown[str(node.target)] += 1
            return None if count == 1 else (None,) * count
        if _is_float_cast(node) and isinstance(ins[0], Partial):
            return ins[0]  # linear, rounding aside; passes reduce before they cast
        try:
            choice = self._consistent_choice(node, ins)
        except _MISFITS as error:
            self._wrong(node, f"can't take operands of these shapes: {error}")
            return None if count == 1 else (None,) * count
        if not choice.proven:
            self.unproven[f"{node.target} at {place_of(info(node).source)}"] += 1
            return None if count == 1 else (None,) * count
        if choice.instead:
            self._report_form(node, ins, choice.instead)
        mask = mask_of(node)
        if mask is not None and (self.axis.is_data or self.axis.scale > 1):
            problem = mask_problem(mask, self.env[mask.x], self.axis.name)
            if problem:
                self._wrong(node, problem)
        fits = all(map(self._lies_as, tensor_inputs(node), ins, choice.wants))
        if not fits or any(isinstance(out, Partial) for out in choice.outs):
            reread = self._reread(node, self._own_readings)
            if not fits and reread is None:
                reread = self._reread(node, self._equal_readings)
            if not fits and reread is None:
                self._report(node, ins, choice.wants)
            choice = reread or choice
        inputs = tensor_inputs(node)
        if count == 1 == len(inputs) and inputs[0] in self.readings:
            self._carry_readings(node, choice)
        if self._is_made_local(node, choice):
            return info(node).placement(self.axis.name)
        if self._may_be_made_local(node, choice):
            self.readings[node] = (REPLICATE, *map(Shard, choice.uniform))
        return choice.outs[0] if count == 1 else choice.outs

    def _is_made_local(self, node: Node, choice: Choice) -> bool:
        """Tell whether a value is constant along the dim that it is recorded to be split along.

        It was made in its local size, which is any rank's part of the whole one. Over dp it may be
        read either way, see `_lies_as`.
        """
        recorded = info(node).placement(self.axis.name)
        is_split = isinstance(recorded, Shard) and not self.axis.is_data
        return is_split and recorded.dim in choice.uniform

    def _may_be_made_local(self, node: Node, choice: Choice) -> bool:
        """Tell whether backward made a constant that nothing is recorded of: its readers tell."""
        is_local = self.axis.scale > 1 and not self.axis.is_data and info(node).phase == "B"
        return is_local and choice.outs == (REPLICATE,) and bool(choice.uniform)

    def _reread(
        self, node: Node, readings_of: Callable[[Node, Node], tuple[Placement, ...]]
    ) -> Choice | None:
        """Return the simplest choice under the readings of what a call reads.

        With one head a rank, ``[2, 1, 6, 8] -> [2, 6, 8]`` merges heads with batch or with tokens.
        Both are true of what the rank holds; the call tells which one its other operands agree to.
        """
        inputs = tensor_inputs(node)
        read_ways = {n: readings_of(n, node) for n in dict.fromkeys(inputs)}
        unsure = [n for n, ways in read_ways.items() if ways != (self.env[n],)]
        before = [self.env[n] for n in unsure]
        fitting: list[tuple[Choice, tuple[Placement, ...]]] = []
        for read in product(*(read_ways[n] for n in unsure)) if unsure else ():
            self.env.update(zip(unsure, read, strict=True))
            ins = tuple(self.env[n] for n in inputs)
            try:
                choice = self._consistent_choice(node, ins)
            except _MISFITS:
                continue  # operands of other shapes than this reading says
            if choice.proven and all(map(self._lies_as, inputs, ins, choice.wants)):
                fitting.append((choice, read))
        self.env.update(zip(unsure, before, strict=True))
        if not fitting:
            return None
        best, agreed = min(fitting, key=lambda found: _sums_first(found[0]))
        for source, placement in zip(unsure, agreed, strict=True):
            if placement in self.readings.get(source, ()):
                self._settle_reading(source, placement)
        return best

    def all_readings(self, value: Node) -> tuple[Placement, ...]:
        """Return every placement that is true of what ranks hold; most often there is one."""
        return self.readings.get(value, (self.env[value],))

    def _own_readings(self, value: Node, reader: Node) -> tuple[Placement, ...]:
        return self.all_readings(value)

    def _equal_readings(self, value: Node, reader: Node) -> tuple[Placement, ...]:
        """Return all placements over dp that say the same of what a rank holds, its own first.

        What is equal for all samples lies along them as well; and one sample's gradient is the sum
        over the samples of one, where backward sums what forward has broadcast.
        """
        own = self.all_readings(value)
        held, shape = self.env[value], shapes_of(value)[0]
        if not self.axis.is_data:
            return own
        if isinstance(held, Replicate):
            along = (Shard(dim) for dim in range(len(shape)))
            return *own, *(shard for shard in along if self.uniformity.is_uniform(value, shard))
        is_one = isinstance(held, Shard) and shape[held.dim] == 1
        return (*own, PARTIAL) if is_one and info(reader).phase == "B" else own

    def _settle_reading(self, node: Node, placement: Placement) -> None:
        """Let a value, and what it was made of, lie as a call that reads it has told."""
        self.env[node] = placement
        if placement in self.came_from.get(node, ()):
            self._settle_reading(node.all_input_nodes[0], self.came_from[node][placement])

    def _carry_readings(self, node: Node, choice: Choice) -> None:
        """Read what is computed of one unsure value in all ways in which that reads."""
        (source,) = tensor_inputs(node)
        held = self.env[source]
        found = dict.fromkeys(self.readings.pop(node, choice.outs), held)
        for read in self.readings[source]:
            self.env[source] = read
            made = self._consistent_choice(node, (read,))
            if made.proven and made.wants == (read,):
                for out in self.readings.pop(node, made.outs):
                    found.setdefault(out, read)
        self.env[source] = held
        if len(found) > 1:
            self.readings[node], self.came_from[node] = tuple(found), found

    def _lies_as(self, node: Node, have: Placement, want: Placement) -> bool:
        """Tell whether an operand may be read as ``want``; over dp constants lie either way."""
        if have == want:
            return True
        split = isinstance(want, Shard) and isinstance(have, Replicate)
        return split and self.axis.is_data and self.uniformity.is_uniform(node, want)

    def _consistent_choice(self, node: Node, ins: tuple[Placement, ...]) -> Choice:
        """Return the rule's choice for global output shapes that agree with what it chose.

        The graph holds local shapes; which dimension of an output is longer globally follows
        from the placement that the rule infers from the global shape. So each is tried. A view
        can have several readings of the same local data: the simplest one is taken.
        """
        found = Question(self.axis, node, ins, self._shapes).decided
        if found.readings:
            self.readings[node] = found.readings
        return found.choice

    def _item(self, node: Node) -> Value:
        source, index = node.args
        values = self.env[source]
        if not isinstance(values, tuple):
            return values
        tensors = [i for i, v in enumerate(val(source)) if isinstance(v, torch.Tensor)]
        return values[tensors.index(index)]

    def _passes_on_bucket(self, node: Node) -> bool:
        """Tell whether a call moves a flat bucket over another axis: its parts keep their own."""
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source not in self.flat:
            return False
        if _is_float_cast(node):
            self.flat[node] = self.flat[source]
            return True
        if node.target not in collectives.ON_BUCKETS:
            return False
        self.flat[node] = self.flat[source]
        return node.target is collectives.wait or self.axis.name not in node.args

    def _packed(self, node: Node) -> Value:
        """Return the placement of a flat buffer: over tp each part keeps its own."""
        self.flat[node] = ""
        values = {self.env[n] for n in node.all_input_nodes if not is_zero(n)}
        return PARTIAL if self.axis.is_data and values == {PARTIAL} else None

    def _param_view(self, node: Node) -> Value:
        """Return the placement of the parameter that is read out of a gathered flat bucket."""
        spec = self._param_at(node)
        if spec is None:
            self._wrong(node, f"no parameter lies at {node.args[1]} of its bucket")
            return None
        return spec.placements.get(self.axis.name, REPLICATE)

    def _param_at(self, node: Node) -> ParamSpec | None:
        """Return the parameter that is stored where a view of a gathered bucket lies."""
        place, shape = (self.bucket_of(node.args[0]), node.args[1]), tuple(node.args[2])
        for spec in self.program.params:
            held = spec.storage
            if isinstance(held, Flat) and (held.bucket, held.offset) == place:
                return spec if spec.local_shape(self.program.mesh) == shape else None
        return None

    def bucket_of(self, node: Node) -> str | None:
        """Return the flat bucket that a value was gathered from, None for any other value."""
        while node.target in collectives.ON_BUCKETS or _is_float_cast(node):
            node = node.all_input_nodes[0]
        return self.flat.get(node)

    def _shapes(self, node: Node) -> tuple[Shape, ...]:
        """Return the global shapes of an input's tensors."""
        held, local = self.env[node], shapes_of(node)
        placements = held if isinstance(held, tuple) else (held,) * len(local)
        return tuple(map(self.axis.whole, local, placements))

    def _report_form(self, node: Node, ins: tuple[Value, ...], form: str) -> None:
        """Report an operator that computes something else on parts than on the whole."""
        held = ", ".join(str(placement) for placement in ins)
        self.wrong.append(
            f"{node.target} in {origin(node)}: can't run on operands that are {held};"
            f" {form.replace('_', ' ')} could"
        )

    def _report(self, node: Node, ins: tuple[Value, ...], wants: tuple[Value, ...]) -> None:
        given = zip(tensor_inputs(node), ins, wants, strict=True)
        bad = [(i, source, *pair) for i, (source, *pair) in enumerate(given) if pair[0] != pair[1]]
        told = [f"operand {i} (%{n}) is {have}, must be {want}" for i, n, have, want in bad]
        made = [f"%{n} is made in {origin(n)}" for _, n, *_ in bad if n.op == "call_function"]
        self._wrong(node, "\n    ".join(["; ".join(told), *made]))

    def _wrong(self, node: Node, what: str) -> None:
        self.wrong.append(f"{node.target} in {origin(node)}: {what}")


def _is_float_cast(node: Node) -> bool:
    return node.target is torch.ops.aten._to_copy.default and val(node).is_floating_point()


def is_zero(node: Node) -> bool:
    """Tell whether a node makes zeros: the gradient of a parameter that has none."""
    return node.target in (torch.ops.aten.new_zeros.default, torch.ops.aten.zeros.default)


def _sums_first(choice: Choice) -> tuple[int, int]:
    """Return an order of readings that agree: fewest sums, then fewest blocks."""
    blocks = sum(len(p.blocks) for p in choice.outs if isinstance(p, Shard))
    return choice.outs.count(PARTIAL), blocks
