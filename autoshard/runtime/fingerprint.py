"""Tell ranks that hold another plan or another program apart before they can hang each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from autoshard.diagnostics import RuntimeMismatchError
from autoshard.ir.program import Program
from autoshard.runtime.batch import hash_text
from autoshard.runtime.control import Control, name_ranks


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of what must be equal on all ranks; the names are those that messages use."""

    plan: int
    program: int
    torch: int  # its version


def take_fingerprint(plan_text: str, program: Program) -> Fingerprint:
    """Return the fingerprint of what this rank is about to run."""
    return Fingerprint(
        hash_text(plan_text), hash_text(program_text(program)), hash_text(torch.__version__)
    )


def program_text(program: Program) -> str:
    """Return everything that ranks must agree on: graphs with shapes, layout, schedule."""
    lines = [str(program.mesh), str(program.num_microbatches), str(program.schedule)]
    lines += [repr(leaf) for leaf in program.leaves]
    lines += [repr(bucket) for bucket in program.buckets]
    lines += [repr(spec) for spec in program.params]
    for name, function in program.functions():
        lines.append(f"{name} {function.inputs} -> {function.outputs}")
        lines += [_node_text(node) for node in function.graph.nodes]
    return "\n".join(lines)


def compare_fingerprints(control: Control, own: Fingerprint) -> None:
    """Raise on all ranks, with one message, when any rank's fingerprint is another one."""
    rows = control.gather([own.plan, own.program, own.torch])
    for place, what in enumerate(("plan", "program", "torch")):
        column = [row[place] for row in rows]
        if len(set(column)) > 1:
            raise RuntimeMismatchError(_odd_ranks(what, column), help=_REMEDY[what])


_REMEDY = {
    "plan": "start all ranks with the same plan file; is it the same on all machines?",
    "program": "the model, the loss or the example batch differ: build them alike on all ranks",
    "torch": "install the same torch on all machines",
}


def _odd_ranks(what: str, column: list[int]) -> str:
    """Return which ranks differ from most (from rank 0 where there is no majority)."""
    common = Counter(column).most_common()
    usual = common[0][0] if common[0][1] > len(column) / 2 else column[0]
    odd = [rank for rank, value in enumerate(column) if value != usual]
    rest = [rank for rank, value in enumerate(column) if value == usual]
    verb = "holds" if len(odd) == 1 else "hold"
    return f"{name_ranks(odd)} {verb} another {what} than {name_ranks(rest)}"


def _node_text(node: torch.fx.Node) -> str:
    fake = node.meta.get("val")
    shape = f"{fake.dtype}{list(fake.shape)}" if isinstance(fake, torch.Tensor) else ""
    return f"{node.name} = {node.target}{node.args}{node.kwargs or ''}: {shape}"
