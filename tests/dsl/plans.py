"""Small helpers and a small model for tests of the plan language; no torch."""

from autoshard.diagnostics import Diagnostic
from autoshard.dsl.load import Loaded, load
from autoshard.dsl.resolve import Examined, examine
from autoshard.model_facts import ModelFacts, ModuleFacts, Packing, ParamFacts, Projection
from autoshard.source import Source

LAYERS = 4
WIDTH = 32


def read(body: str) -> Loaded:
    """Read a plan given without its version line."""
    return load(Source("t.plan", f"autoshard 1\n{body}"))


def examined(body: str, facts: ModelFacts | None = None, world: int | None = None) -> Examined:
    """Read a plan that is right by itself, and fit it."""
    return examine(read(body).require(), facts, world)


def codes(found: tuple[Diagnostic, ...]) -> list[str]:
    """Return the codes in order."""
    return [diagnostic.code for diagnostic in found]


def only(found: tuple[Diagnostic, ...]) -> Diagnostic:
    """Return the one diagnostic there is."""
    assert len(found) == 1, [f"{d.code} {d.message}" for d in found]
    return found[0]


def module(
    path: str, kind: str, shape: tuple[int, ...] | None = None, children: tuple[str, ...] = ()
) -> ModuleFacts:
    """Describe a module; its weight, if it has one, is its only parameter."""
    params = () if shape is None else (ParamFacts(f"{path}.weight", shape, "float32"),)
    return ModuleFacts(path, kind.capitalize(), kind, shape, params, children)


def layer(i: int) -> list[ModuleFacts]:
    """Describe one block: attention with one q|k|v layer and one with separate ones, and an MLP."""
    h = f"h.{i}"
    return [
        module(h, "other", children=("ln", "attn", "cross", "mlp")),
        module(f"{h}.ln", "norm", (WIDTH,)),
        module(f"{h}.attn", "other", children=("qkv", "out")),
        module(f"{h}.attn.qkv", "linear", (3 * WIDTH, WIDTH)),
        module(f"{h}.attn.out", "linear", (WIDTH, WIDTH)),
        module(f"{h}.cross", "other", children=("q_proj", "k_proj")),
        module(f"{h}.cross.q_proj", "linear", (WIDTH, WIDTH)),
        module(f"{h}.cross.k_proj", "linear", (WIDTH // 2, WIDTH)),
        module(f"{h}.mlp", "other", children=("up", "act", "down")),
        module(f"{h}.mlp.up", "linear", (4 * WIDTH, WIDTH)),
        module(f"{h}.mlp.act", "other"),
        module(f"{h}.mlp.down", "linear", (WIDTH, 4 * WIDTH)),
    ]


def model(tie: bool = True) -> ModelFacts:
    """Describe a small model: 8 query heads, 4 key/value heads in `cross`, a vocabulary of 101."""
    layers = [part for i in range(LAYERS) for part in layer(i)]
    root = module("", "other", children=("wte", "wpe", "h", "head"))
    stack = module("h", "other", children=tuple(str(i) for i in range(LAYERS)))
    wte = module("wte", "embedding", (101, WIDTH))
    wpe = module("wpe", "embedding", (64, WIDTH))
    home = "wte.weight" if tie else "head.weight"
    weight = ParamFacts("head.weight", (101, WIDTH), "float32", True, home)
    head = ModuleFacts("head", "Linear", "linear", (101, WIDTH), (weight,))
    heads = {f"h.{i}.cross.q_proj": Projection("query", 8, 4) for i in range(LAYERS)}
    heads |= {f"h.{i}.cross.k_proj": Projection("key", 4, 4) for i in range(LAYERS)}
    packing = Packing("concatenated", (WIDTH, WIDTH, WIDTH))
    return ModelFacts(
        class_name="Tiny",
        modules=(root, wte, wpe, stack, *layers, head),
        ties=(("wte.weight", "head.weight"),) if tie else (),
        num_heads=8,
        num_kv_heads=4,
        head_dim=4,
        packed={f"h.{i}.attn.qkv": packing for i in range(LAYERS)},
        projections=heads,
        hf_tp_plan={"h.*.mlp.up": "colwise", "head": "colwise_gather_output", "gone": "rowwise"},
    )
