"""One line of facts about a plan that fits, and the command that starts it."""

from autoshard.dsl.resolve import Resolved
from autoshard.model_facts import ModelFacts
from autoshard.units import show_count


def facts_line(resolved: Resolved, facts: ModelFacts | None = None) -> str:
    """Return model, mesh, batch, schedule and split modules in one line.

    What isn't known without a model or a number of processes is left out or named as `auto`.
    """
    parts = [f"{facts.class_name} {show_count(facts.num_params)}"] if facts else []
    parts += [f"mesh {_mesh(resolved)}", f"batch {_batch(resolved)}"]
    if resolved.plan.zero.stage:
        parts.append(f"zero {resolved.plan.zero.stage}")
    if resolved.mesh.size("pp") > 1:
        parts.append(_schedule(resolved))
    if resolved.tensor:
        number = len(resolved.tensor)
        parts.append(f"{number} module{'s' * (number != 1)} under tensor rules")
    return "; ".join(parts)


def launch_line(resolved: Resolved, script: str = "train.py") -> str:
    """Return the torchrun command for the plan's number of processes."""
    if resolved.auto is not None:
        others = resolved.mesh.world_size
        note = f"({resolved.auto} is auto: N is any multiple of {others})"
        return f"start it:  torchrun --nproc-per-node N {script}  {note}"
    world = resolved.mesh.world_size
    if world == 1:
        return f"start it:  python {script}"
    per_node = resolved.plan.assume.gpus_per_node or world
    if per_node < world and world % per_node == 0:
        return (
            f"start it:  torchrun --nnodes {world // per_node} --nproc-per-node {per_node} {script}"
        )
    return f"start it:  torchrun --standalone --nproc-per-node {world} {script}"


def bubble(resolved: Resolved) -> float | None:
    """Return the part of a step that a rank idles, all stages taking equally long.

    With p stages and m micro-batches, (p - 1) / (m v + p - 1) for v stages per rank; None for
    schedules that this formula doesn't hold for.
    """
    if resolved.plan.pipeline.schedule not in ("gpipe", "1f1b", "interleaved_1f1b"):
        return None
    idle = resolved.mesh.size("pp") - 1
    work = resolved.num_microbatches * resolved.plan.pipeline.virtual_stages
    return idle / (work + idle)


def _mesh(resolved: Resolved) -> str:
    if resolved.auto is None:
        return str(resolved.mesh)
    axes = (f"{a.name} {'auto' if a.name == resolved.auto else a.size}" for a in resolved.mesh.axes)
    return " x ".join(axes)


def _batch(resolved: Resolved) -> str:
    step = f"{resolved.micro_batch_size} x {resolved.num_microbatches}"
    if resolved.auto in resolved.mesh.members("dp"):
        return f"{step} x dp"
    return f"{step} x dp {resolved.mesh.size('dp')} = {resolved.global_batch_size}"


def _schedule(resolved: Resolved) -> str:
    schedule = resolved.plan.pipeline.schedule
    name = schedule if isinstance(schedule, str) else "csv"
    idle = bubble(resolved)
    return f"{name}, bubble {100 * idle:.1f} %" if idle is not None else name
