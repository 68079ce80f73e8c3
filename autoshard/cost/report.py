"""The program as tables: passes, memory per stage, traffic, the schedule and its bubble."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from autoshard.cost.peak import CATEGORIES, HOST
from autoshard.cost.replay import peaks
from autoshard.cost.stage_times import stage_times
from autoshard.cost.traffic import TrafficRow, traffic
from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from autoshard.schedule.render import render_grid
from autoshard.schedule.simulate import Simulation, simulate
from autoshard.units import show_bytes

GRID_RANKS = 16  # wider pipelines and longer schedules are summed up, not drawn
GRID_MICROBATCHES = 32


def passes_table(program: Program) -> str:
    """Return one line a pass: nodes, collectives added, seconds, remarks."""
    rows, before = [], {}
    for entry in program.journal:
        added = _added(before, entry.collectives)
        rows.append([entry.pass_text, entry.nodes, added, f"{entry.seconds:.2f}", entry.remarks])
        before = entry.collectives
    heads = ["pass", "nodes", "collectives", "seconds", "remarks"]
    return tabulate(rows, heads, colalign=("left", "right", "left", "right", "right"))


def memory_table(program: Program, optimizer: str = "adamw", *, has_host: bool = True) -> str:
    """Return one line a pipeline coordinate: bytes of its ranks at their peak, and when it is.

    Where something is gathered, a column for the most of it at any moment; where something is
    offloaded, one for what lies in host memory; see ``cost.replay``.
    """
    rows, found = [], peaks(program, optimizer, has_host=has_host)
    is_gathered, is_offloaded = (any(getattr(p, n) for p in found) for n in ("gathered", "host"))
    for rank, peak in enumerate(found):
        sizes = [*(peak.sizes.get(name, 0) for name in CATEGORIES), peak.total]
        sizes += [peak.gathered] * is_gathered + [peak.host] * is_offloaded
        rows.append([rank, *map(show_bytes, sizes), peak.place])
    apart = ["most gathered"] * is_gathered + [f"on the {HOST}"] * is_offloaded
    heads = ["pp rank", *CATEGORIES, "together", *apart, "at the peak"]
    return tabulate(rows, heads, colalign=(*("right",) * (len(heads) - 1), "left"))


def traffic_table(program: Program) -> str:
    """Return one line per stage, axis and kind: what one rank moves in one step."""
    rows = [_traffic_row(row) for row in _fold(traffic(program))]
    heads = ["stage", "axis", "collective", "calls", "payload", "on the wire"]
    return tabulate(rows, heads, colalign=("left", "left", "left", "right", "right", "right"))


def schedule_text(program: Program) -> str:
    """Return the schedule's grid (when it is small) and both bubbles, also by estimated flops."""
    schedule = program.schedule
    simulation, estimated = simulate(schedule), simulate(schedule, stage_times(program))
    head = "\n".join(
        [
            f"{schedule.name}, {schedule.num_ranks} ranks, "
            f"{schedule.num_microbatches} micro-batches: {_bubbles(simulation)} at F = I = W",
            f"  {_bubbles(estimated)} with times of F, I and W by each stage's flops",
        ]
    )
    small = schedule.num_ranks <= GRID_RANKS and schedule.num_microbatches <= GRID_MICROBATCHES
    return "\n".join([head, render_grid(simulation)]) if small else head


def _bubbles(simulation: Simulation) -> str:
    step, span = float(simulation.step_bubble), float(simulation.span_bubble)
    return f"step bubble {step:.1%}, span bubble {span:.1%}"


def mesh_text(mesh: Mesh) -> str:
    """Return "pp 2 x tp 2 = 4"."""
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)
    return f"{axes} = {mesh.world_size}"


def _fold(rows: Sequence[TrafficRow]) -> list[tuple[str, TrafficRow]]:
    """Return the rows with runs of stages that move the same written as one."""
    groups: dict[tuple, list[TrafficRow]] = {}
    for row in rows:
        key = (row.axis, row.kind, row.calls, row.payload_bytes)
        groups.setdefault(key, []).append(row)
    named = [(_stages([row.stage for row in same]), same[0]) for same in groups.values()]
    return sorted(named, key=lambda pair: (pair[1].axis, pair[1].kind, pair[1].stage))


def _stages(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _traffic_row(pair: tuple[str, TrafficRow]) -> list[object]:
    stages, row = pair
    sizes = (show_bytes(row.payload_bytes), show_bytes(row.wire_bytes))
    return [stages, row.axis, row.kind, row.calls, *sizes]


def _added(before: dict[str, int], after: dict[str, int]) -> str:
    changes = {k: after.get(k, 0) - before.get(k, 0) for k in sorted({*before, *after})}
    return ", ".join(f"{kind} {count:+d}" for kind, count in changes.items() if count)
