"""`autoshard.Plan`: the exact Python twin of a plan file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from autoshard import plan as data
from autoshard.dsl.formatter import format_text
from autoshard.dsl.load import load, load_file
from autoshard.dsl.printer import to_text
from autoshard.dsl.twin import text_of_blocks
from autoshard.source import Source, Span

Block = Mapping[str, object]


class Plan(data.Plan):
    """A whole plan, built from Python values, read from a file, or written as one.

    >>> plan = Plan(mesh={"tp": 2}, tensor={"mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"})
    >>> plan.mesh["tp"], plan.zero.stage
    (2, 0)
    >>> print(plan.to_text())
    autoshard 1
    <BLANKLINE>
    mesh {
      tp = 2
    }
    <BLANKLINE>
    tensor {
      mlp.c_fc:   colwise
      mlp.c_proj: rowwise
    }
    <BLANKLINE>

    Each block is a mapping with the names of the language. In `tensor` and `recompute` a key that
    is no setting is a path, `"optional PATH"` and `"override PATH"` mark it, a mapping is a scope.
    """

    def __init__(
        self,
        mesh: Block = data.Plan.mesh,
        batch: Block | data.BatchBlock = data.Plan.batch,
        tensor: Block | data.TensorBlock = data.Plan.tensor,
        pipeline: Block | data.PipelineBlock = data.Plan.pipeline,
        zero: Block | data.ZeroBlock = data.Plan.zero,
        precision: Block | data.PrecisionBlock = data.Plan.precision,
        recompute: Block | data.RecomputeBlock = data.Plan.recompute,
        fuse: Block | data.FuseBlock = data.Plan.fuse,
        assume: Block | data.AssumeBlock = data.Plan.assume,
        spans: Mapping[str, Span] | None = None,
    ) -> None:
        """Build a plan; raises `PlanError` with every mistake, as a file would."""
        blocks = (mesh, batch, tensor, pipeline, zero, precision, recompute, fuse, assume)
        given: dict[str, Any] = dict(zip(data.BLOCKS, blocks, strict=True))
        typed = {n: b for n, b in given.items() if type(b) is type(getattr(data.Plan, n))}
        written = {name: block for name, block in given.items() if name not in typed}
        text = text_of_blocks(written)
        read = load(Source("Plan(...)", text)).require()
        for name in data.BLOCKS:
            object.__setattr__(self, name, typed.get(name, getattr(read, name)))
        object.__setattr__(self, "spans", dict(read.spans) | dict(spans or {}))

    @classmethod
    def load(cls, path: str | Path, sets: Iterable[str] = ()) -> Plan:
        """Read a plan file; each of `sets` is `block.setting=value` and wins over the file."""
        return cls._of(load_file(path, sets).require())

    @classmethod
    def from_text(cls, text: str, name: str = "plan") -> Plan:
        """Read a plan from text; messages call it `name`."""
        return cls._of(load(Source(name, text)).require())

    @classmethod
    def _of(cls, plan: data.Plan) -> Plan:
        return cls(**{field.name: getattr(plan, field.name) for field in fields(plan)})

    def to_text(self) -> str:
        """Return the plan as a file; reading it gives an equal plan."""
        return format_text(Source("plan", to_text(self)))
