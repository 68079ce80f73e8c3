"""Count what the loss is averaged over, before the first forward: valid tokens of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autoshard.ir.graph_function import BUFFER, NORMALIZER
from autoshard.ir.node_info import val
from autoshard.ir.program import Program
from autoshard.ops.communicator import Communicator
from autoshard.runtime.codegen import Compiled


class Prelude:
    """Runs the program's prelude on every micro-batch and sums its counts."""

    def __init__(
        self, program: Program, call: Compiled, constants: Mapping[str, torch.Tensor]
    ) -> None:
        """Read inputs, counts and the dtype of the normalizers off the program."""
        self._call = call
        assert program.prelude is not None
        self._inputs = [port.name for port in program.prelude.inputs]
        self._given = {
            port.name: constants[port.name]
            for port in program.prelude.inputs
            if port.kind == BUFFER
        }
        self._names = [port.name for port in program.prelude.outputs]
        self._dtypes = _normalizer_dtypes(program)

    def run(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], comm: Communicator
    ) -> dict[str, torch.Tensor]:
        """Return name -> 1 / (the count over all micro-batches and data parallel ranks).

        No valid element at all gives infinity, so the loss becomes NaN, as torch's does.
        """
        held = [{**leaves, **self._given} for leaves in microbatches]
        rows = [self._call(comm, [leaves[n] for n in self._inputs]) for leaves in held]
        totals = [torch.stack(counts).sum(0) for counts in zip(*rows, strict=True)]
        works = [comm.all_reduce_start(total, "dp") for total in totals]
        counts = dict(zip(self._names, (work.wait() for work in works), strict=True))
        return {name: counts[name].to(self._dtypes[name]).reciprocal() for name in self._dtypes}


def _normalizer_dtypes(program: Program) -> dict[str, torch.dtype]:
    functions = (f for stage in program.stages for f in stage.phases.values())
    return {
        name: val(node).dtype
        for function in functions
        for name, node in function.named(NORMALIZER).items()
    }
