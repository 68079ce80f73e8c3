"""What decides a program, ingredient by ingredient: of equal keys the programs are equal."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.cache.digest import Digest
from autoshard.cache.store import Key, hash_of
from autoshard.dsl.printer import to_text
from autoshard.ir.batch import Loss
from autoshard.ir.facts import describe
from autoshard.plan import Call, Plan, Rule, Use

PACKAGE = Path(__file__).resolve().parents[1]


def model_parts(model: nn.Module, loss: Loss | None) -> dict[str, str]:
    """Return the ingredients that the user's code decides: the model with its code, and the loss.

    Parameters and buffers count by name, shape, dtype and ties, not by their values. Raises
    ``cache.digest.Opaque`` where an object can't be looked into.
    """
    parameters = [
        f"{name} {value.dtype} {tuple(value.shape)} {value.requires_grad} {value.is_meta}"
        for named in (model.named_parameters, model.named_buffers)
        for name, value in named(remove_duplicate=False)
    ]
    return {
        "parameters": hash_of(*parameters, repr(describe(model))),
        "model": Digest().add(model).text(),
        "loss": Digest().add(loss).text(),
    }


def program_key(
    label: str,
    parts: Mapping[str, str],
    captured: bytes,
    plan: Plan,
    batch: object,
    world: int | None,
    training: bool,
) -> Key:
    """Return the key of one program: its capture, ``parts`` of its model, the plan, a batch, torch.

    ``captured`` says all of the forward graph: what a model read that no part shows is in it.
    ``label`` is for people: the model's class.
    """
    found = {
        **parts,
        "plan": hash_of(to_text(plan), *_texts(plan), *_schedules(plan)),
        "batch": _batch(batch),
        "graph": hashlib.blake2b(captured, digest_size=16).hexdigest(),
        "mode": hash_of(str(world), str(training)),
        "versions": versions(),
        "settings": _settings(),
    }
    return Key(label, found)


def _batch(batch: object) -> str:
    """Hash what a batch is like; leaves that are no tensors are constants of the program."""

    def like(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return ("tensor", str(leaf.dtype), tuple(leaf.shape), leaf.device.type)
        return leaf

    return Digest().add(pytree.tree_map(like, batch)).text()


def _texts(plan: Plan) -> list[str]:
    """Return the names and texts that nodes point into: another comment is another line."""
    rules: tuple[Rule | Use, ...] = (*plan.tensor.rules, *plan.recompute.rules, *plan.tensor.uses)
    spans = (*plan.spans.values(), *(rule.span for rule in rules))
    sources = dict.fromkeys(span.source for span in spans if span is not None)
    return [text for source in sources for text in (source.name, source.text)]


def _schedules(plan: Plan) -> list[str]:
    """Return the text of the schedule's file, if the plan names one that is there."""
    schedule = plan.pipeline.schedule
    if not isinstance(schedule, Call) or not Path(str(schedule.args[0])).is_file():
        return []
    return [Path(str(schedule.args[0])).read_text(errors="replace")]


@cache
def versions(package: Path = PACKAGE) -> str:
    """Hash the versions of what compiles: of autoshard its own code, which may be edited."""
    beside = [package.parent / name for name in ("passes", "dsl")]  # in a bare checkout
    files = [path for folder in (package, *beside) for path in sorted(folder.rglob("*"))]
    code = [path for path in files if path.suffix in (".py", ".lark")]
    texts = [text for path in code for text in (path.name, path.read_text())]
    return hash_of(
        torch.__version__, str(torch.version.git_version), platform.python_version(), *texts
    )


def _settings() -> str:
    """Hash what torch is told for the whole process and what lowering asks of this machine."""
    backends = torch.backends.cuda
    said: list[Callable[[], object]] = [
        torch.get_default_dtype,
        torch.get_default_device,
        torch.are_deterministic_algorithms_enabled,
        torch.is_autocast_enabled,
        torch.backends.cpu.get_cpu_capability,
        backends.flash_sdp_enabled,
        backends.mem_efficient_sdp_enabled,
        backends.math_sdp_enabled,
        torch.is_inference_mode_enabled,
    ]
    return hash_of(*(str(ask()) for ask in said))
