"""Refuse, by name and with the way out, what capture would get wrong or could not express."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from autoshard.compat import (
    DATA_DEPENDENT,
    FakeTensor,
    UnsupportedOperatorException,
    watch_lost_gradients,
)
from autoshard.diagnostics import AutoshardError, CaptureError
from autoshard.ir.custom_functions import CustomFunctions
from autoshard.ir.fake_model import TABLES, kept_attributes
from autoshard.ir.user_line import line_here, line_of_traceback, span_of

_WRAPPERS = {
    "DistributedDataParallel": "give the plain model; `zero { stage = 0 }` does what it does",
    "DataParallel": "give the plain model",
    "FullyShardedDataParallel": "give the plain model; `zero { stage = 3 }` does what it does",
    "FSDPModule": "give the plain model; `zero { stage = 3 }` does what it does",
    "OptimizedModule": "give the model before torch.compile",
    "ScriptModule": "give the model before torch.jit",
    "DeepSpeedEngine": "give the plain model",
}
_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_LOST = {
    "checkpoint": (
        "activation checkpointing inside the model: capture would inline it away",
        "remove it (gradient_checkpointing_disable() for Hugging Face) and say it in the plan:"
        " recompute { h.*: full }",
    ),
    "inference_mode": (
        "torch.inference_mode() inside the model: capture would lose it",
        "use torch.no_grad()",
    ),
}


def check_model(model: nn.Module, training: bool) -> None:
    """Refuse a model that is wrapped, hooked, spread over devices, or not plain."""
    refuse_wrappers(model)
    _refuse_odd_tensors(model)
    _refuse_shared_memory(model)
    _refuse_hooks(model)
    _refuse_devices(model)
    if training:
        _refuse_batch_norm(model)
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        raise CaptureError(
            "capture runs inside an autocast region",
            code="AS703",
            help="leave the region; precision is a block of the plan: precision { compute = bf16 }",
        )


@contextmanager
def watched(model: nn.Module, functions: CustomFunctions) -> Iterator[Callable[[], None]]:
    """Refuse lost gradients as they happen; give a check to call at the end of forward.

    Custom autograd functions are noted in ``functions``, to be checked after the trace.

    The check refuses tensors kept in attributes; what was written there is undone on exit.
    """
    with kept_attributes(model) as before, watch_lost_gradients(_refuse_lost, functions.note):
        yield lambda: _refuse_kept_tensors(model, before)


def explain(error: Exception, model: nn.Module) -> AutoshardError:
    """Return the CaptureError that tells a user of ours what ``error`` means and where it arose."""
    if isinstance(error, AutoshardError):
        return error
    line = line_of_traceback(error)
    path = path_of_traceback(error, model)
    where = f" in `{path}`" if path else ""
    if isinstance(error, DATA_DEPENDENT):
        return CaptureError(
            f"what the model does depends on the values of a tensor{where}",
            code="AS701",
            span=span_of(line),
            label="decided here",
            help="choose with torch.where instead of if, and no .item(), int() or nonzero():"
            " one fixed program must serve every batch",
        )
    if isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error):
        return CaptureError(
            f"an operator without a fake implementation{where}: {_first_line(error)}",
            code="AS705",
            span=span_of(line),
            help="register one with torch.library.register_fake",
        )
    ways_out = [
        "run it once on a real batch as loss(model(...), batch); what works there but reads a"
        " tensor's numbers (numpy, tolist, data_ptr) can't be captured"
    ]
    if "'NoneType' object" in str(error):
        ways_out.append(
            "some models make an input that is left out themselves, but not while they are"
            " exported: give it in the batch (attention_mask, position_ids)"
        )
    return CaptureError(
        f"the model fails on fake tensors{where}: {type(error).__name__}: {_first_line(error)}",
        code="AS700",
        span=span_of(line),
        help=tuple(ways_out),
    )


def path_of_traceback(error: BaseException, model: nn.Module) -> str:
    """Return the path of the innermost module of ``model`` in whose method the error arose."""
    # While torch traces, `self` is a stand-in that shares the module's attribute dictionary.
    paths = {id(module.__dict__): path for path, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        holder = trace.tb_frame.f_locals.get("self")
        found = paths.get(id(getattr(holder, "__dict__", None)), found)
        trace = trace.tb_next
    return found


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no message").strip()


def _refuse_lost(kind: str) -> None:
    message, way_out = _LOST[kind]
    raise CaptureError(message, code="AS702", span=span_of(line_here()), help=way_out)


def refuse_wrappers(model: nn.Module) -> None:
    """Refuse a model that DistributedDataParallel, torch.compile and the like have wrapped.

    The paths of its modules begin with the wrapper's own: no rule of a plan would match them.
    """
    for path, module in model.named_modules():
        names = {cls.__name__ for cls in type(module).__mro__}
        wrapper = next((name for name in _WRAPPERS if name in names), None)
        if wrapper is not None:
            raise CaptureError(
                f"{_called(path, module)} is already wrapped as {wrapper}",
                code="AS703",
                help=_WRAPPERS[wrapper],
            )
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise CaptureError(
                f"{_called(path, module)} is compiled",
                code="AS703",
                help="give the model before module.compile()",
            )


def _refuse_hooks(model: nn.Module) -> None:
    for attribute, kind in _HOOKS.items():
        if getattr(nn.modules.module, f"_global{attribute}", None):
            raise CaptureError(
                f"there is a {kind} on all modules: hooks can't fire in a flat graph",
                code="AS704",
                help="remove it",
            )
    for path, module in model.named_modules():
        for attribute, kind in _HOOKS.items():
            hooks: Mapping = getattr(module, attribute, None) or {}
            for hook in hooks.values():
                raise CaptureError(
                    f"{_called(path, module)} has a {kind}, `{_hook_name(hook)}`: hooks can't fire"
                    " in a flat graph",
                    code="AS704",
                    help="remove the hook; torch.nn.utils.weight_norm and spectral_norm have"
                    " versions without one in torch.nn.utils.parametrizations",
                )
    for name, param in model.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter `{name}` has a gradient hook: hooks can't fire in a flat graph",
                code="AS704",
                help="remove the hook; act on .grad after forward_backward",
            )


def _refuse_odd_tensors(model: nn.Module) -> None:
    named = (*model.named_parameters(), *model.named_buffers())
    for name, value in named:
        if isinstance(value, nn.parameter.UninitializedTensorMixin):
            raise CaptureError(
                f"`{name}` is not initialized (a lazy module)",
                code="AS703",
                help="run the model once on a batch first",
            )
        if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            raise CaptureError(
                f"`{name}` is a {type(value).__name__}, not a plain tensor",
                code="AS703",
                help="give the plain model, before it is sharded or quantized",
            )
        if value.is_complex() and value.requires_grad:
            raise CaptureError(
                f"`{name}` is a trained parameter of complex numbers",
                code="AS703",
                help="train its two parts: keep torch.view_as_real(w) as the nn.Parameter, and"
                f" read torch.view_as_complex(self.{name.rpartition('.')[2]}) in forward",
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse parameters that share elements and are not one Parameter: a step changes both."""
    seen: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, param in model.named_parameters():
        if param.is_meta or not param.numel():
            continue
        others = seen.setdefault(param.untyped_storage().data_ptr(), [])
        for other_name, other in others:
            if _overlap(param, other):
                raise CaptureError(
                    f"parameters `{other_name}` and `{name}` share memory, but are not one",
                    code="AS703",
                    help="tie them: register one Parameter under both names, and transpose it where"
                    " it is read",
                )
        others.append((name, param))


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two views of one memory have an element in common."""
    marks = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def _refuse_devices(model: nn.Module) -> None:
    homes: dict[torch.device, str] = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        homes.setdefault(value.device, name)
    if len(homes) > 1:
        listed = ", ".join(f"`{name}` on {device}" for device, name in homes.items())
        raise CaptureError(
            f"the model lies on several devices: {listed}",
            code="AS703",
            help="put it on one device (or all on meta); the plan decides where its parts go",
        )


def _refuse_batch_norm(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if not _updates_statistics(module) or not (module.training or not model.training):
            continue
        raise CaptureError(
            f"{_called(path, module)} is a {type(module).__name__} in train mode: its batch"
            " statistics would be those of one micro-batch of one rank",
            code="AS706",
            help="use LayerNorm or GroupNorm, or freeze it: model.train() and then"
            f" model.get_submodule('{path}').eval()",
        )


def _updates_statistics(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    return isinstance(module, nn.modules.instancenorm._InstanceNorm) and (
        module.track_running_stats is True
    )


def _refuse_kept_tensors(model: nn.Module, before: Mapping[nn.Module, dict]) -> None:
    """Refuse a forward that leaves behind tensors that the next one could read.

    A cache that is built from constants on first use is fine: the program builds it each time.
    """
    for path, name, old, new in _changed_attributes(model, before):
        is_kept = old is new or any(True for _ in _tensors(old))
        if is_kept or any(tensor.requires_grad for tensor in _tensors(new)):
            raise CaptureError(
                f"`{path or type(model).__name__}` keeps a tensor in its attribute `{name}` from"
                " one forward to the next",
                code="AS707",
                help="return it instead, or register it as a buffer that forward only reads",
            )


def _called(path: str, module: nn.Module) -> str:
    return f"`{path}`" if path else f"the model ({type(module).__name__})"


def _hook_name(hook: Callable) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def _changed_attributes(
    model: nn.Module, before: Mapping[nn.Module, dict]
) -> Iterator[tuple[str, str, object, object]]:
    """Yield path, name, old and new value of attributes that now hold a tensor of the trace."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in TABLES and any(isinstance(t, FakeTensor) for t in _tensors(value)):
                yield path, name, before[module].get(name), value


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
