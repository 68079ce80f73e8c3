"""DTensor's propagation of shardings as a second oracle of the placement rules.

Both say how a result lies for operands that lie in a given way. Where both run on the operands as
they are, they speak of the same local results and must agree. Blocks are unknown to DTensor, and
some operators are: those are left out.

    python -m tests.ir.dtensor_oracle
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed.tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema

from autoshard.ir.placement import Partial, Placement, Shard
from autoshard.ir.rules.call import Call, TensorRef
from autoshard.ir.rules.table import choose
from tests.ir.rule_harness import bind, combinations, tensors_of
from tests.ir.test_rules import CASES

RANKS = 2


@dataclass(frozen=True)
class Opinion:
    """What both say of one operator whose operands lie as ``ins``."""

    op: str
    ins: tuple[Placement, ...]
    ours: tuple[str, ...]
    theirs: tuple[str, ...]


def both(name: str) -> list[Opinion]:
    """Return what both say of one case of the rules' property tests."""
    random.seed(name)
    torch.manual_seed(len(name))
    op, *args = CASES[name]()
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    return list(_opinions(op, tuple(args), kwargs))


def _opinions(op: object, args: tuple, kwargs: dict) -> Iterator[Opinion]:
    """Yield what both say wherever both run on the operands as they lie."""
    bound, values = bind(op, args, kwargs)
    expected = tensors_of(op(*args, **kwargs))
    shapes = tuple(tuple(v.shape) for v in values), tuple(tuple(e.shape) for e in expected)
    call = Call(op, bound, *shapes, RANKS)
    for ins in combinations(values, RANKS):
        choice = choose(call, ins)
        is_known = choice.proven and not choice.instead and choice.wants == ins
        if not is_known or any(isinstance(p, Shard) and p.blocks for p in (*ins, *choice.outs)):
            continue
        theirs = _propagated(op, bound, values, ins)
        if theirs is not None:
            yield Opinion(str(op), ins, tuple(map(str, choice.outs)), theirs)


def _propagated(
    op: object, bound: dict[str, object], values: list[torch.Tensor], ins: tuple[Placement, ...]
) -> tuple[str, ...] | None:
    """Return how DTensor says the results lie, None where it has no rule or moves an operand."""

    def given(value: object) -> object:
        if isinstance(value, TensorRef):
            return _spec(values[value.index], ins[value.index])
        return [given(item) for item in value] if isinstance(value, list) else value

    places = [a for a in op._schema.arguments if not a.kwarg_only]
    arguments = tuple(given(bound[a.name]) for a in places)
    named = {a.name: bound[a.name] for a in op._schema.arguments if a.kwarg_only}
    try:
        found = _propagator().propagate_op_sharding_non_cached(OpSchema(op, arguments, named))
    except Exception:  # whatever it is: it has no opinion
        return None
    if found.needs_redistribute or found.output_spec is None:
        return None
    specs = found.output_spec if isinstance(found.output_spec, tuple) else (found.output_spec,)
    return tuple(str(spec.placements[0]) for spec in specs if spec is not None)


def _spec(value: torch.Tensor, placement: Placement) -> DTensorSpec:
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    if isinstance(placement, Shard):
        return DTensorSpec(_mesh(), (dtensor.Shard(placement.dim),), tensor_meta=meta)
    kind = dtensor.Partial() if isinstance(placement, Partial) else dtensor.Replicate()
    return DTensorSpec(_mesh(), (kind,), tensor_meta=meta)


@cache
def _mesh() -> DeviceMesh:
    """Return a mesh that no process group stands behind: nothing is sent."""
    return DeviceMesh("cpu", torch.arange(RANKS), _init_backend=False, _rank=0)


def _propagator() -> object:
    return dtensor.DTensor._op_dispatcher.sharding_propagator


def main() -> int:
    """Ask about all cases; print how often both agree, and where they do not."""
    found = [opinion for name in CASES for opinion in both(name)]
    apart = [opinion for opinion in found if opinion.ours != opinion.theirs]
    known = len({opinion.op for opinion in found})
    print(f"{len(found)} opinions on {known} operators, {len(apart)} of them apart")
    print("\n".join(map(str, apart)))
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
