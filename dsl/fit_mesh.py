"""Fit the mesh to the number of processes, and the batch to the mesh."""

from dataclasses import dataclass
from math import prod

from autoshard.diagnostics import Diagnostic, Label
from autoshard.mesh import DATA_PARALLEL, Axis, Mesh
from autoshard.plan import Plan
from autoshard.units import divisors


@dataclass(frozen=True)
class Fitted:
    """Hold the mesh; `auto` names an axis whose size isn't known without a number of processes."""

    mesh: Mesh
    auto: str | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    is_known: bool = True  # False when a faulty setting hides an axis

    def size(self, axis: str) -> int | None:
        """Return the size of an axis, None when it isn't known yet."""
        if not self.is_known or self.auto in self.mesh.members(axis):
            return None
        return self.mesh.size(axis)


@dataclass(frozen=True)
class Batch:
    """Hold the three numbers of the batch."""

    micro_batch_size: int
    num_microbatches: int
    global_batch_size: int


def fit_mesh(plan: Plan, world_size: int | None) -> Fitted:
    """Return the mesh with `auto` filled in, and what doesn't fit."""
    found = _axis_faults(plan)
    if any(plan.is_faulty(key.removesuffix(":key")) for key in _written_axes(plan)):
        return Fitted(Mesh(), None, tuple(found), is_known=False)  # nothing would add up
    fixed = {name: size for name, size in plan.mesh.items() if isinstance(size, int)}
    autos = [name for name in plan.mesh if name not in fixed]
    auto, product = (autos[0] if autos else None), prod(fixed.values())
    if auto is not None and world_size is not None:
        if world_size % product:
            found.append(_auto_fault(plan, auto, fixed, world_size))
        fixed[auto] = max(1, world_size // product)
        auto = None
    elif world_size is not None and product != world_size:
        found.append(_world_fault(plan, fixed, world_size))
    mesh = Mesh(tuple(Axis(name, fixed.get(name, 1)) for name in plan.mesh))
    return Fitted(mesh, auto, tuple(found))


def fit_batch(plan: Plan, fitted: Fitted) -> tuple[Batch, tuple[Diagnostic, ...]]:
    """Return the batch with what isn't given derived, and what doesn't add up.

    What neither is given nor follows is 1.
    """
    given = plan.batch
    micro, count, total = given.micro_batch_size, given.num_microbatches, given.global_batch_size
    dp = fitted.size("dp")
    if total is None or dp is None:
        micro, count = micro or 1, count or 1
        return Batch(micro, count, total or micro * count * fitted.mesh.size("dp")), ()
    if micro is not None and count is not None:
        fault = () if micro * count * dp == total else (_sum_fault(plan, dp),)
        return Batch(micro, count, total), fault
    known = (micro or count or 1) * dp
    if total % known:
        return Batch(micro or 1, count or 1, total), (_division_fault(plan, dp, known),)
    if micro is not None:
        return Batch(micro, total // known, total), ()
    return Batch(total // known, count or 1, total), ()


def _written_axes(plan: Plan) -> list[str]:
    return [key for key in plan.spans if key.startswith("mesh.") and key.endswith(":key")]


def _axis_faults(plan: Plan) -> list[Diagnostic]:
    found = []
    autos = [name for name, size in plan.mesh.items() if size == "auto"]
    for name in autos[1:]:
        first = plan.span(f"mesh.{autos[0]}")
        marks = (Label(first, "the first one"),) if first else ()
        message = "only one axis can be `auto`"
        help = (f"give `{name}` a number",)
        found.append(Diagnostic("AS301", message, plan.span(f"mesh.{name}"), "", help, (), marks))
    both = [name for name in DATA_PARALLEL if name in plan.mesh]
    if "dp" in plan.mesh and both:
        message = f"`dp` and `{both[0]}` are two ways to say the same"
        help = ("keep `dp`, or `dp_replicate` and `dp_shard`",)
        span = plan.key_span(f"mesh.{both[0]}")
        found.append(Diagnostic("AS303", message, span, "", help))
    if plan.mesh.get("cp", 1) != 1:
        message = "context parallelism (`cp`) is reserved for a later version"
        help = ("remove it; `sequence_parallel = on` splits activations over `tp`",)
        found.append(Diagnostic("AS306", message, plan.key_span("mesh.cp"), "", help))
    return found


def _auto_fault(plan: Plan, auto: str, fixed: dict[str, int], world_size: int) -> Diagnostic:
    others = prod(fixed.values())
    return Diagnostic(
        "AS305",
        f"{world_size} processes can't be divided into groups of {others}",
        plan.span(f"mesh.{auto}"),
        f"{_product(fixed)}",
        (f"start a multiple of {others} processes",),
    )


def _world_fault(plan: Plan, fixed: dict[str, int], world_size: int) -> Diagnostic:
    total = prod(fixed.values())
    started = f"{world_size} process{' was' if world_size == 1 else 'es were'} started"
    message = f"the mesh has {total} place{'s' * (total != 1)} but {started}"
    help = [f"start {total} process{'es' * (total != 1)}"]
    axis = "dp" if not set(DATA_PARALLEL) & set(fixed) else "dp_shard"
    others = total // fixed.get(axis, 1)
    if world_size % others == 0:
        way = "set" if axis in fixed else "add"
        help.append(f"or {way} `{axis} = {world_size // others}` (or `{axis} = auto`)")
    return Diagnostic("AS302", message, plan.span("mesh"), _product(fixed), tuple(help))


def _product(sizes: dict[str, int]) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in sizes.items())
    return f"{axes} = {prod(sizes.values())}" if axes else "no axis"


def _sum_fault(plan: Plan, dp: int) -> Diagnostic:
    batch = plan.batch
    micro, count, total = batch.micro_batch_size, batch.num_microbatches, batch.global_batch_size
    assert micro and count and total  # the caller saw all three
    help = [f"`global_batch_size = {micro * count * dp}`"]
    if total % (micro * dp) == 0:
        help.append(f"or `num_microbatches = {total // (micro * dp)}`")
    elif total % (count * dp) == 0:
        help.append(f"or `micro_batch_size = {total // (count * dp)}`")
    product = f"{micro} x {count} microbatches x dp {dp} = {micro * count * dp}"
    return Diagnostic(
        "AS304",
        f"the batch does not add up: {product}",
        plan.span("batch.global_batch_size"),
        f"but global_batch_size = {total}",
        (*help, "give any two of the three and the third is derived"),
    )


def _division_fault(plan: Plan, dp: int, known: int) -> Diagnostic:
    batch = plan.batch
    total = batch.global_batch_size or 0
    name = "micro_batch_size" if batch.micro_batch_size else "num_microbatches"
    given = batch.micro_batch_size or batch.num_microbatches
    product = f"{name} {given} x dp {dp}" if given else f"dp {dp}"
    below, above = total // known * known, (total // known + 1) * known
    near = " or ".join(f"`global_batch_size = {n}`" for n in (below, above) if n)
    fits = [str(d) for d in divisors(total // dp)] if total % dp == 0 and given else []
    help = (near, *([f"or `{name}` one of: {', '.join(fits)}"] if fits else []))
    return Diagnostic(
        "AS304",
        f"the batch does not add up: {total} is no multiple of {product} = {known}",
        plan.span("batch.global_batch_size"),
        f"{total} / {known} = {total / known:.6g}",
        help,
    )
