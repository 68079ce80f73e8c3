"""Fit a plan to a model and a number of processes: sizes, batch, and a rule for each module."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.diagnostics import Diagnostic, InternalError
from autoshard.mesh import Mesh
from autoshard.model_facts import ModelFacts
from autoshard.plan import Plan, Rule
from autoshard.source import Span


@dataclass(frozen=True)
class ResolvedRule:
    """Give one module or parameter its style; Hugging Face names are already translated."""

    path: str  # a module path, or the fully qualified name of a parameter
    style: str
    options: Mapping[str, object]
    rule: Rule


@dataclass(frozen=True)
class Resolved:
    """Hold a plan that fits: every number known, every rule bound to a path of the model."""

    plan: Plan
    mesh: Mesh
    micro_batch_size: int
    num_microbatches: int
    global_batch_size: int
    tensor: Mapping[str, ResolvedRule] = field(default_factory=dict)
    recompute: Mapping[str, ResolvedRule] = field(default_factory=dict)
    warnings: tuple[Diagnostic, ...] = ()
    not_executable: tuple[tuple[str, Span | None], ...] = ()

    def require_executable(self) -> None:
        """Raise `NotExecutableError` when the plan sets anything this version can't run yet."""
        raise InternalError("not built yet")


def resolve(plan: Plan, facts: ModelFacts | None = None, world_size: int | None = None) -> Resolved:
    """Fit `plan` to a model and a number of processes, or raise `PlanError` with all that is wrong.

    Without `facts` no rule is looked up; without `world_size` an `auto` axis counts as 1.
    """
    raise InternalError("not built yet")
