"""Bind a Program to one rank: axes to a communicator, buckets to memory, graphs to code."""

from __future__ import annotations

from autoshard.diagnostics import InternalError
from autoshard.ir.program import Program
from autoshard.runtime.codegen import Compiled, generate
from autoshard.runtime.comm import Transport
from autoshard.runtime.executor import Executable
from autoshard.runtime.inductor import inductor_for
from autoshard.runtime.layout import plan_layout, scheduled
from autoshard.runtime.phases import Code, generate_code
from autoshard.runtime.storage import Storage


def link(
    program: Program,
    comm: Transport,
    *,
    storage: Storage | None = None,
    code: Code | None = None,
    prelude: Compiled | None = None,
) -> Executable:
    """Return the program ready to run on the rank that ``comm`` belongs to.

    ``storage`` is that of an earlier program of the same plan (another batch signature, or the
    evaluation program); without one, new buffers are allocated: fill them with ``write``. ``code``
    and ``prelude`` may be shared by ranks of one process.
    """
    _check(program)
    stages = scheduled(program).stages_of(comm.index("pp"))
    if storage is None:
        storage = Storage(program, comm, stages)
    elif plan_layout(program, stages) != storage.layout:
        raise InternalError("two programs of one plan lay their parameters out differently")
    if prelude is None and program.prelude is not None:
        prelude = generate(program.prelude, "prelude", program.kernels)
    notes: tuple[str, ...] = ()
    if code is None:
        inductor = inductor_for(program, comm.device)
        code = generate_code(program, stages, inductor)
        notes = (inductor.summary(),) if inductor is not None else ()
    return Executable(program, comm, storage, code, prelude, notes)


def _check(program: Program) -> None:
    schedule, pipeline = scheduled(program), program.mesh.size("pp")
    if schedule.num_ranks != pipeline:
        raise InternalError(
            f"the schedule has {schedule.num_ranks} ranks, the mesh pp = {pipeline}"
        )
    if schedule.num_microbatches != program.num_microbatches:
        raise InternalError(
            f"the schedule runs {schedule.num_microbatches} micro-batches,"
            f" the program {program.num_microbatches}"
        )
    for stage in program.stages:
        if "F" not in stage.phases:
            raise InternalError(f"stage {stage.index} has no phase F: it is not lowered")
