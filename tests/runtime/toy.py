"""A two-layer model lowered by hand, for every kind of parallelism the run-time has to carry."""

import torch
from torch.fx import Graph, Node

from autoshard.ir.graph_function import (
    ACCUMULATED,
    BATCH,
    BOUNDARY,
    COUNT,
    FLAT,
    FLAT_GRAD,
    FULL,
    FULL_GRAD,
    GRAD,
    LOSS,
    NORMALIZER,
    PARAM,
    SAVED,
    TANGENT,
    GraphFunction,
    Port,
)
from autoshard.ir.params import Flat, ParamSpec, ParamTable, Whole
from autoshard.ir.placement import Shard
from autoshard.ir.program import BatchLeaf, Bucket, Program, Stage
from autoshard.mesh import Mesh
from autoshard.ops import collectives
from autoshard.schedule import lower_schedule, make_schedule

aten = torch.ops.aten
DTYPE = torch.float64
ROWS, WIDE, HIDDEN, OUT = 2, 3, 4, 5  # samples of a micro-batch, and three widths
IGNORED = -100.0  # a target that takes no part in the loss


class Builder:
    """Builds one GraphFunction with fake values."""

    def __init__(self, mode):
        self.graph, self.mode = Graph(), mode
        self.ports, self.inputs = [], {}

    def input(self, kind, name, *shape, dtype=DTYPE):
        port = Port(kind, name)
        if port not in self.inputs:
            node = self.graph.placeholder(f"{kind}_{name}".replace(".", "_"))
            with self.mode:
                node.meta["val"] = torch.empty(shape, dtype=dtype)
            self.ports.append(port)
            self.inputs[port] = node
        return self.inputs[port]

    def call(self, op, *args):
        node = self.graph.call_function(op, args)
        fakes = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = op(*fakes)
        return node

    def build(self, *outputs: tuple[str, str, Node | None]):
        self.graph.output(tuple(node for _, _, node in outputs))
        ports = tuple(Port(kind, name) for kind, name, _ in outputs)
        return GraphFunction(self.graph, tuple(self.ports), ports)


class Toy:
    """loss = sum over valid (tanh(x a^T) b^T - t)^2 / number of valid elements."""

    def __init__(self, *, dp=1, pp=1, tp=1, m=1, zero=0, schedule="1f1b"):
        self.mesh = Mesh.of(pp=pp, dp=dp, tp=tp)
        self.dp, self.pp, self.tp, self.m, self.zero, self.schedule = dp, pp, tp, m, zero, schedule
        self.mode = torch._subclasses.FakeTensorMode()
        self.shapes = {"a.weight": (HIDDEN // tp, WIDE), "b.weight": (OUT, HIDDEN // tp)}

    def program(self):
        functions = self._phases()
        stages = []
        for index in range(self.pp):
            phases = functions[index] if self.pp == 2 else self._merged()
            stages.append(Stage(index, phases["F"], phases={**phases, **self._storage(index)}))
        return Program(
            mesh=self.mesh,
            params=ParamTable(tuple(self._specs())),
            leaves=(
                BatchLeaf("x", (ROWS, WIDE), DTYPE),
                BatchLeaf("t", (ROWS, OUT), DTYPE),
            ),
            training=True,
            num_microbatches=self.m,
            prelude=self._prelude(),
            stages=stages,
            buckets=tuple(self._buckets()),
            schedule=lower_schedule(
                make_schedule(self.schedule, num_ranks=self.pp, num_microbatches=self.m),
                reduce_per="microbatch" if self.zero == 3 else "step",
                unshard="step" if self.zero == 1 else "never",
            ),
        )

    # the model ----------------------------------------------------------------------------------
    def _phases(self):
        return {0: self._first(), 1: self._second()}

    def _first(self, prefix=""):
        f = Builder(self.mode)
        h = f.call(aten.tanh.default, self._linear(f, f.input(BATCH, "x", ROWS, WIDE), "a.weight"))
        forward = f.build((BOUNDARY, "h", h), (SAVED, "act", h))
        i = Builder(self.mode)
        g = self._tanh_grad(i, i.input(TANGENT, "h", *self._h), i.input(SAVED, "act", *self._h))
        w = Builder(self.mode)
        grad = self._weight_grad(w, w.input(SAVED, "g", *self._h), w.input(BATCH, "x", ROWS, WIDE))
        return {"F": forward, "I": i.build((SAVED, "g", g)), "W": self._emit(w, "a", grad)}

    def _second(self):
        f = Builder(self.mode)
        h = f.input(BOUNDARY, "h", *self._h)
        d, loss = self._loss(f, h)
        forward = f.build((LOSS, "", loss), (SAVED, "d", d), (SAVED, "h", h))
        i = Builder(self.mode)
        gy = self._loss_grad(i)
        gh = i.call(aten.mm.default, gy, self._param(i, "b.weight"))
        w = Builder(self.mode)
        grad = self._weight_grad(w, w.input(SAVED, "gy", ROWS, OUT), w.input(SAVED, "h", *self._h))
        inputs = i.build((TANGENT, "h", gh), (SAVED, "gy", gy))
        return {"F": forward, "I": inputs, "W": self._emit(w, "b", grad)}

    def _merged(self):
        """Return both layers as one stage."""
        f = Builder(self.mode)
        h = f.call(aten.tanh.default, self._linear(f, f.input(BATCH, "x", ROWS, WIDE), "a.weight"))
        d, loss = self._loss(f, h)
        i = Builder(self.mode)
        gy = self._loss_grad(i)
        gh = i.call(aten.mm.default, gy, self._param(i, "b.weight"))
        g = self._tanh_grad(i, gh, i.input(SAVED, "h", *self._h))
        w = Builder(self.mode)
        grad_b = self._weight_grad(
            w, w.input(SAVED, "gy", ROWS, OUT), w.input(SAVED, "h", *self._h)
        )
        grad_a = self._weight_grad(
            w, w.input(SAVED, "g", *self._h), w.input(BATCH, "x", ROWS, WIDE)
        )
        return {
            "F": f.build((LOSS, "", loss), (SAVED, "d", d), (SAVED, "h", h)),
            "I": i.build((SAVED, "gy", gy), (SAVED, "g", g)),
            "W": self._emit(w, "ab", grad_a, grad_b),
        }

    @property
    def _h(self):
        return ROWS, HIDDEN // self.tp

    def _linear(self, b, x, name):
        return b.call(aten.linear.default, x, self._param(b, name))

    def _loss(self, b, h):
        y = self._linear(b, h, "b.weight")
        if self.tp > 1:
            y = b.call(collectives.all_reduce, y, "tp")
        t = b.input(BATCH, "t", ROWS, OUT)
        valid = b.call(aten.ne.Scalar, t, IGNORED)
        gap = b.call(aten.sub.Tensor, y, t)
        d = b.call(aten.mul.Tensor, gap, valid)
        square = b.call(aten.sum.default, b.call(aten.mul.Tensor, d, d))
        return d, b.call(aten.mul.Tensor, square, b.input(NORMALIZER, "0"))

    def _loss_grad(self, b):
        d = b.call(aten.mul.Tensor, b.input(SAVED, "d", ROWS, OUT), b.input(NORMALIZER, "0"))
        twice = b.call(aten.mul.Scalar, d, 2.0)
        return b.call(aten.mul.Tensor, twice, b.input(TANGENT, "loss"))

    def _tanh_grad(self, b, tangent, h):
        slope = b.call(aten.rsub.Scalar, b.call(aten.mul.Tensor, h, h), 1)
        return b.call(aten.mul.Tensor, tangent, slope)

    def _weight_grad(self, b, g, x):
        return b.call(aten.mm.default, b.call(aten.t.default, g), x)

    def _prelude(self):
        b = Builder(self.mode)
        valid = b.call(aten.ne.Scalar, b.input(BATCH, "t", ROWS, OUT), IGNORED)
        return b.build((COUNT, "0", b.call(aten.sum.default, valid)))

    # storage ------------------------------------------------------------------------------------
    def _bucket_of(self, letters):
        return f"s{0 if 'a' in letters else 1}" if self.pp == 2 else "s0"

    def _names(self, bucket):
        if self.pp == 1:
            return ("a.weight", "b.weight")
        return ("a.weight",) if bucket == "s0" else ("b.weight",)

    def _length(self, bucket):
        sizes = [rows * columns for rows, columns in map(self.shapes.get, self._names(bucket))]
        return -(-sum(sizes) // self.dp) * self.dp

    def _offset(self, name):
        both = self.pp == 1 and name == "b.weight"
        rows, columns = self.shapes["a.weight"]
        return rows * columns if both else 0

    def _param(self, b, name):
        bucket = self._bucket_of(name[0])
        if self.zero != 3:
            return b.input(PARAM, name, *self.shapes[name])
        shard = b.input(FLAT, bucket, self._length(bucket) // self.dp)
        started = b.call(collectives.all_gather_start, shard, 0, [], "dp", self.dp)
        full = b.call(collectives.wait, started)
        return b.call(collectives.view_at, full, self._offset(name), list(self.shapes[name]))

    def _emit(self, w, letters, *grads):
        bucket = self._bucket_of(letters)
        names = [f"{letter}.weight" for letter in letters]
        if self.zero != 3:
            return w.build(*((GRAD, n, g) for n, g in zip(names, grads, strict=True)))
        flat = w.call(collectives.pack, list(grads), self._length(bucket))
        shard = w.call(collectives.reduce_scatter, flat, 0, [], "dp", self.dp)
        return w.build((FLAT_GRAD, bucket, shard))

    def _storage(self, index):
        """Return the U and R graphs of a stage."""
        if self.dp == 1 or self.zero == 3:
            return {}
        bucket = f"s{index}"
        r = Builder(self.mode)
        total = r.input(ACCUMULATED, bucket, self._length(bucket))
        if self.zero == 0:
            return {"R": r.build((FULL_GRAD, bucket, r.call(collectives.all_reduce, total, "dp")))}
        shard = r.call(collectives.reduce_scatter, total, 0, [], "dp", self.dp)
        u = Builder(self.mode)
        own = u.input(FLAT, bucket, self._length(bucket) // self.dp)
        full = u.call(collectives.all_gather, own, 0, [], "dp", self.dp)
        return {"R": r.build((FLAT_GRAD, bucket, shard)), "U": u.build((FULL, bucket, full))}

    def _buckets(self):
        axis = "dp" if self.zero else None
        for index in range(self.pp):
            name = f"s{index}"
            yield Bucket(name, index, self._names(name), self._length(name), DTYPE, axis)

    def _specs(self):
        cuts = {"a.weight": Shard(0), "b.weight": Shard(1)}
        shapes = {"a.weight": (HIDDEN, WIDE), "b.weight": (OUT, HIDDEN)}
        for name, home in (("a.weight", 0), ("b.weight", self.pp - 1)):
            bucket = self._bucket_of(name[0])
            place = Whole(bucket, self._offset(name))
            if self.zero:
                place = Flat(bucket, self._offset(name), self._length(bucket))
            yield ParamSpec(
                name,
                shapes[name],
                DTYPE,
                placements={"tp": cuts[name]} if self.tp > 1 else {},
                homes=(home,),
                storage=place,
            )

    # data ---------------------------------------------------------------------------------------
    def values(self):
        generator = torch.Generator().manual_seed(1)
        shapes = {"a.weight": (HIDDEN, WIDE), "b.weight": (OUT, HIDDEN)}
        return {n: torch.randn(s, dtype=DTYPE, generator=generator) for n, s in shapes.items()}

    def batches(self, steps=2, seed=2):
        """Return [step][dp rank] local batches with unequal numbers of valid targets."""
        generator = torch.Generator().manual_seed(seed)
        return [[self._batch(generator) for _ in range(self.dp)] for _ in range(steps)]

    def _batch(self, generator):
        rows = ROWS * self.m
        x = torch.randn(rows, WIDE, dtype=DTYPE, generator=generator)
        t = torch.randn(rows, OUT, dtype=DTYPE, generator=generator)
        ignored = torch.rand(rows, OUT, generator=generator) < 0.3
        return {"x": x, "t": t.masked_fill(ignored, IGNORED)}


def reference_loss(params, batches):
    """Return the loss of one plain process on the batches of all data parallel ranks."""
    x = torch.cat([batch["x"] for batch in batches])
    t = torch.cat([batch["t"] for batch in batches])
    y = torch.tanh(x @ params["a.weight"].T) @ params["b.weight"].T
    valid = t != IGNORED
    return ((y - t) * valid).square().sum() / valid.sum()
