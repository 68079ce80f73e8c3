"""Random plans: every setting of the schema with a value of its kind, random rules."""

from dataclasses import replace

from hypothesis import strategies as st

from autoshard.dsl.compound_values import Calls, Globs, Parts, WordList
from autoshard.dsl.schema import SCHEMA
from autoshard.dsl.specs import BlockSpec, SettingSpec
from autoshard.dsl.values import Bandwidth, Bytes, Enum, Flag, Integer, LossScale, OnOff
from autoshard.plan import BLOCKS, Call, MeshBlock, Plan, Rule, Style, Use
from autoshard.units import Size

segments = st.sampled_from(
    ["h", "*", "**", "[0..3]", "[1,5]", "{q,k}_proj", "c_?c", "0", "attn-1", "drop", "a+b", "é"]
)
paths = st.lists(segments, min_size=1, max_size=4).map(".".join)


def values(spec: SettingSpec) -> st.SearchStrategy:
    """Return the values that a setting can take, its default aside."""
    kind = spec.kind
    words = st.sampled_from(kind.words) if kind.words else st.nothing()
    if isinstance(kind, Integer):
        return words | st.integers(kind.minimum, min(kind.maximum, 10**6))
    if isinstance(kind, Enum):
        return words
    if isinstance(kind, OnOff):
        return st.booleans()
    if isinstance(kind, Flag):
        return st.just(True)
    if isinstance(kind, Bytes):
        units = ["bytes", "elements"] if kind.elements else ["bytes"]
        sizes = st.builds(Size, st.integers(0, 2**50), st.sampled_from(units))
        return sizes | st.sampled_from([0.0, 0.5, 1.0]) if kind.percent else sizes
    if isinstance(kind, Bandwidth):
        return st.integers(1, 2**45).map(float)
    if isinstance(kind, LossScale):
        return words | st.integers(1, 2**20).map(float)
    if isinstance(kind, Globs):
        return words | st.lists(paths, min_size=1, max_size=3).map(tuple)
    if isinstance(kind, WordList):
        return st.lists(st.sampled_from(kind.words), min_size=1, max_size=2).map(tuple)
    if isinstance(kind, Parts):
        sizes = st.lists(st.sampled_from(["q", "kv", 8, 16]), min_size=1, max_size=3).map(tuple)
        return st.integers(1, 8) | sizes
    assert isinstance(kind, Calls)
    return words | st.sampled_from(kind.calls).flatmap(lambda call: calls(*call, kind.texts))


def calls(name: str, options: tuple, texts: tuple[str, ...]) -> st.SearchStrategy:
    """Return calls of one function: with its options, or with paths."""
    if options:
        named = {option: st.sampled_from(words) for option, words in options}
        return st.fixed_dictionaries(named).map(lambda given: Call(name, (), given))
    args = st.just(("a b.csv",)) if name in texts else st.lists(paths, min_size=1).map(tuple)
    return args.map(lambda given: Call(name, given))


def rules(spec: BlockSpec) -> st.SearchStrategy:
    """Return rules with styles of a block."""
    styles = st.sampled_from(spec.styles).flatmap(
        lambda style: st.fixed_dictionaries(
            {}, optional={option.name: values(option) for option in style.options}
        ).map(lambda options: Style(style.name, options))
    )
    marks = st.sampled_from(["", "", "override", "optional"])
    return st.lists(st.builds(Rule, paths, styles, marks), max_size=4).map(tuple)


def block(spec: BlockSpec) -> st.SearchStrategy:
    """Return one block with some of its settings given."""
    given = st.fixed_dictionaries({}, optional={s.name: values(s) for s in spec.settings})
    if spec.name == "mesh":
        return given.flatmap(
            lambda sizes: st.permutations(list(sizes.items())).map(lambda p: MeshBlock(tuple(p)))
        )
    kind = type(getattr(Plan(), spec.name))
    built = given.map(lambda settings: kind(**settings))
    if spec.styles:
        built = st.builds(lambda b, r: replace(b, rules=r), built, rules(spec))
    if spec.name == "tensor":
        uses = st.integers(0, 4).map(lambda at: (Use("transformers.tp_plan", at),))
        built = st.builds(
            lambda b, u: replace(b, uses=tuple(Use(x.name, min(x.at, len(b.rules))) for x in u)),
            built,
            st.just(()) | uses,
        )
    return built


plans = st.builds(Plan, **{spec.name: block(spec) for spec in SCHEMA})
assert tuple(spec.name for spec in SCHEMA) == BLOCKS
