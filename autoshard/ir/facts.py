"""Describe a module as the plain data that plans are resolved against.

Heads and packed projections are told from names and widths here, before anything is captured. That
is what makes `plan check` able to say "these are 8 key/value heads"; a pass must not rely on it
where the graph itself says what happens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from autoshard.ir.capture_guards import refuse_wrappers
from autoshard.model_facts import (
    Kind,
    ModelFacts,
    ModuleFacts,
    Packing,
    ParamFacts,
    Projection,
    Role,
)

QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
HEAD_DIMS = ("head_dim", "d_kv", "key_value_proj_dim", "attention_head_size")
WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "width")
ROLES: Mapping[Role, tuple[str, ...]] = {
    "query": ("q", "q_proj", "query", "q_lin", "wq", "q_linear"),
    "key": ("k", "k_proj", "key", "k_lin", "wk", "k_linear"),
    "value": ("v", "v_proj", "value", "v_lin", "wv", "v_linear"),
}
CONCATENATED = ("c_attn", "qkv_proj", "qkv", "wqkv", "in_proj", "attn_qkv", "c_qkv")
# These keep q, k and v of a head beside each other, so an even split gives whole heads.
INTERLEAVED = ("query_key_value",)
# Attentions whose layer has a name of the first kind and outputs of the second.
INTERLEAVED_IN = ("CodeGenAttention",)
PROJECTIONS = {*CONCATENATED, *INTERLEAVED, *(name for names in ROLES.values() for name in names)}


@dataclass(frozen=True)
class Heads:
    """Count the heads of an attention: query heads, key/value heads, width of a head."""

    query: int
    kv: int
    dim: int


def describe(model: nn.Module) -> ModelFacts:
    """Return what a plan needs to know about `model`; reads no values, so meta is fine.

    Raises CaptureError for a model that is wrapped already: its paths aren't the plain model's.
    """
    refuse_wrappers(model)
    homes, ties = _parameter_names(model)
    heads = _heads(model)
    packed: dict[str, Packing] = {}
    projections: dict[str, Projection] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            width = module.embed_dim
            packed[_join(path, "in_proj_weight")] = Packing("concatenated", (width,) * 3)
        own = _heads_here(module, heads)
        if own is None:
            continue
        for name, child in module.named_children():
            inside = type(module).__name__ in INTERLEAVED_IN and name in CONCATENATED
            _note_projection(_join(path, name), name, child, own, packed, projections, inside)
    return ModelFacts(
        class_name=type(model).__name__,
        modules=tuple(_module(path, part, homes) for path, part in model.named_modules()),
        ties=ties,
        num_heads=heads.query if heads else None,
        num_kv_heads=heads.kv if heads else None,
        head_dim=heads.dim if heads else None,
        packed=packed,
        projections=projections,
        hf_tp_plan=dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}),
    )


def _parameter_names(model: nn.Module) -> tuple[dict[int, str], tuple[tuple[str, ...], ...]]:
    """Return the home name of each parameter by identity, and the names of each tied one."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    homes = {key: found[0] for key, found in names.items()}
    return homes, tuple(tuple(found) for found in names.values() if len(found) > 1)


def _module(path: str, module: nn.Module, homes: Mapping[int, str]) -> ModuleFacts:
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    return ModuleFacts(
        path=path,
        type_name=type(module).__name__,
        kind=_kind(module),
        weight_shape=None if weight is None else tuple(weight.shape),
        params=tuple(_param(_join(path, n), p, homes[id(p)]) for n, p in own.items()),
        children=tuple(name for name, _ in module.named_children()),
    )


def _param(name: str, param: nn.Parameter, home: str) -> ParamFacts:
    dtype = str(param.dtype).removeprefix("torch.")
    return ParamFacts(name, tuple(param.shape), dtype, param.requires_grad, home)


def _kind(module: nn.Module) -> Kind:
    """Return what a rule may do with the module; transformers' Conv1D is known by its name."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    name = type(module).__name__
    if name == "Conv1D":
        return "conv1d"
    return "norm" if name.endswith(("LayerNorm", "RMSNorm")) else "other"


def _heads(model: nn.Module) -> Heads | None:
    """Return the heads that the config states, else those of the first module that has any."""
    config = getattr(model, "config", None)
    found = _read_heads(config, _first_int(config, WIDTHS))
    if found is not None:
        return found
    read = (_heads_here(module, None) for module in model.modules())
    return next((heads for heads in read if heads), None)


def _heads_here(module: nn.Module, default: Heads | None) -> Heads | None:
    """Return the heads of an attention module, None for a module that isn't one.

    A module is an attention when it has a count of heads, or a child named like a projection.
    """
    width = next((_in_features(child) for child in module.children() if _in_features(child)), None)
    own = _read_heads(module, _first_int(module, WIDTHS) or width)
    if own is None:
        names = {name for name, _ in module.named_children()}
        return default if names & PROJECTIONS else None
    if default is not None and _first_int(module, KV_HEADS) is None and own.query == default.query:
        return default
    return own


def _read_heads(holder: object, width: int | None) -> Heads | None:
    query = _first_int(holder, QUERY_HEADS)
    dim = _first_int(holder, HEAD_DIMS) or (width // query if query and width else None)
    if query is None or dim is None:
        return None
    return Heads(query, _kv_heads(holder) or query, dim)


def _kv_heads(holder: object) -> int | None:
    """Return the key heads that are stated; Falcon and GPT-BigCode say "multi-query" for one."""
    is_grouped = _attribute(holder, "new_decoder_architecture") is True
    if _attribute(holder, "multi_query") is True and not is_grouped:
        return 1
    return _first_int(holder, KV_HEADS)


def _first_int(holder: object, names: tuple[str, ...]) -> int | None:
    values = (_attribute(holder, name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _attribute(holder: object, name: str) -> object:
    try:
        return getattr(holder, name, None)
    except RuntimeError:  # transformers' configurations say so that layers differ in it
        return None


def _in_features(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    if _kind(module) not in ("linear", "conv1d") or weight is None:
        return None
    return weight.shape[1 if _kind(module) == "linear" else 0]


def _note_projection(
    path: str,
    name: str,
    layer: nn.Module,
    heads: Heads,
    packed: dict[str, Packing],
    projections: dict[str, Projection],
    interleaved: bool,
) -> None:
    """Note a layer that computes heads, where its width agrees with its name."""
    weight = getattr(layer, "weight", None)
    if _kind(layer) not in ("linear", "conv1d") or weight is None:
        return
    width = weight.shape[0 if _kind(layer) == "linear" else 1]
    parts = (heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim)
    is_one = heads.kv == 1 < heads.query  # then nothing alternates head by head
    if width == sum(parts) and (name in CONCATENATED or is_one) and not interleaved:
        packed[path] = Packing("concatenated", parts)
    elif width == sum(parts) and (interleaved or name in INTERLEAVED):
        packed[path] = Packing("interleaved", parts)
    for role, names in ROLES.items():
        count = heads.query if role == "query" else heads.kv
        if name in names and width == count * heads.dim:
            projections[path] = Projection(role, count, heads.dim)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
