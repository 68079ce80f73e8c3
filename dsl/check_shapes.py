"""Check tensor rules against shapes: what divides, whole heads, packed weights, tied weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoshard.diagnostics import Diagnostic
from autoshard.dsl.match_rules import Matched
from autoshard.dsl.printer import show_style
from autoshard.dsl.schema import BLOCK
from autoshard.dsl.split_target import KINDS, Target, part_sizes, target_at
from autoshard.dsl.suggest_paths import shortened
from autoshard.model_facts import ModelFacts, Packing, Projection
from autoshard.plan import Rule, Style
from autoshard.units import divisors


@dataclass(frozen=True)
class Checker:
    """Check one model's rules for `tp` ranks; `tp` is None while it isn't known."""

    facts: ModelFacts
    tp: int | None

    def check(self, matched: Matched) -> list[Diagnostic]:
        """Return what is wrong: for each rule the first layer of each fault, then the ties."""
        found: list[Diagnostic] = []
        for rule, paths in matched.matches:
            own = [path for path in paths if matched.winners[path] is rule]
            found += self._rule(rule, own)
        if self.tp != 1:
            found += self._ties(matched.winners)
        return found

    def _rule(self, rule: Rule, paths: list[str]) -> list[Diagnostic]:
        """Return the first fault of each code, so that a rule over 80 layers speaks once."""
        if rule.style.name not in KINDS:
            return []
        first: dict[str, Diagnostic] = {}
        for path in paths:
            target = target_at(self.facts, path)
            for fault in self._faults(rule, target, paths):
                first.setdefault(fault.code, fault)
        return list(first.values())

    def _faults(self, rule: Rule, target: Target, paths: list[str]) -> Iterator[Diagnostic]:
        if target.shape is None:
            yield self._no_weight(rule, target, paths)
            return
        if target.kind not in KINDS[rule.style.name]:
            yield self._wrong_kind(rule, target)
            return
        dim = target.split_dim(rule.style.name)
        if dim is None or self.tp == 1:
            return
        packing = self.facts.packed.get(target.path)
        # Outputs that are gathered at once may be cut anywhere.
        options = rule.style.options.keys() & {"parts", "gather"}
        is_plain = rule.style.name == "colwise" and not options
        if is_plain and packing is not None and packing.layout == "concatenated":
            yield self._packed(rule, target, packing)
            return
        heads = [*self._heads(rule, target, packing)] if self.tp else []
        yield from heads or self._widths(rule, target, target.shape[dim])

    def _no_weight(self, rule: Rule, target: Target, paths: list[str]) -> Diagnostic:
        """Return AS207; an attention's own children then need no rule for itself."""
        weighted = {p for p in paths if target_at(self.facts, p).shape is not None}
        head, _, last = rule.glob.rpartition(".")
        children = target.module.children if target.module else ()
        notes: tuple[str, ...] = ()
        if weighted and "*" in last:
            names = sorted({path.rpartition(".")[2] for path in weighted})
            listed = names[0] if len(names) == 1 else f"{{{','.join(names)}}}"
            help = f"name the layers that have one: `{head + '.' if head else ''}{listed}`"
        elif children:
            help = f"name the layers below it: {shortened(sorted(children))}"
        else:
            help = f"`{target.path}` needs no rule: remove it from this one"
        below = [f"{target.path}.{name}" for name in children]
        if any(path in self.facts.packed or path in self.facts.projections for path in below):
            notes = (
                "attention as a whole needs no rule: the split of its query, key and value layers "
                "carries through it",
            )
        return Diagnostic(
            "AS207",
            f"`{rule.style.name}` needs a layer with a weight",
            rule.span,
            f"{target.type_name} has none of its own",
            (help,),
            notes,
        )

    def _wrong_kind(self, rule: Rule, target: Target) -> Diagnostic:
        kinds = {"linear": "linear", "conv1d": "Conv1D", "embedding": "embedding"}
        names = [kinds[kind] for kind in KINDS[rule.style.name]]
        help = [f"`{rule.style.name}` splits {', '.join(names[:-1])} or {names[-1]} layers"]
        if target.kind == "embedding":
            help.append("`vocab` splits the rows of an embedding, `colwise` its columns")
        if target.kind == "norm":
            help.append("a norm stays whole: it needs no rule, or `replicate`")
        return Diagnostic(
            "AS210",
            f"`{rule.style.name}` can't split a {target.type_name}",
            rule.span,
            f"`{target.path}` is one",
            tuple(help),
        )

    def _packed(self, rule: Rule, target: Target, packing: Packing) -> Diagnostic:
        equal = len(set(packing.parts)) == 1
        options = f"parts={len(packing.parts)}" if equal else "parts=[q, kv, kv]"
        what = "splits each third" if equal else "splits each part"
        return Diagnostic(
            "AS403",
            f"`{target.path}` packs query, key and value in one weight",
            rule.span,
            "a plain colwise would give rank 0 all of the queries",
            (f"`colwise({options})` {what}",),
            ("if its outputs alternate head by head, `colwise(parts=1)` says so",)
            if target.kind == "linear"
            else (),
        )

    def _heads(self, rule: Rule, target: Target, packing: Packing | None) -> Iterator[Diagnostic]:
        """Yield AS402 when a rank would get a part of a head."""
        assert self.tp is not None
        for role, heads, dim in self._head_counts(target, packing):
            copies = rule.style.options.get("replicate", 1) if role == "key/value" else 1
            assert isinstance(copies, int)
            fits = heads * copies == self.tp if copies > 1 else heads % self.tp == 0
            fits = fits or self._pads_heads(rule, target, dim)
            if rule.style.name != "colwise" or fits:
                continue
            yield self._head_fault(rule, target, (role, heads, dim))
            return

    def _pads_heads(self, rule: Rule, target: Target, dim: int) -> bool:
        """Tell whether `pad` makes whole heads for each rank, of the smallest part if packed."""
        pad, split = rule.style.options.get("pad"), target.split_dim(rule.style.name)
        if not isinstance(pad, int) or split is None or target.shape is None or self.tp is None:
            return False
        sizes = part_sizes(rule.style, target.shape[split], self.facts)
        step = pad * self.tp
        return sizes is not None and -(-min(sizes) // step) * step % (dim * self.tp) == 0

    def _head_counts(self, target: Target, packing: Packing | None) -> list[tuple[str, int, int]]:
        projection: Projection | None = self.facts.projections.get(target.path)
        if projection is not None:
            role = "query" if projection.role == "query" else "key/value"
            return [(role, projection.heads, projection.head_dim)]
        query, kv, dim = self.facts.num_heads, self.facts.num_kv_heads, self.facts.head_dim
        if packing is None or not query or not kv or not dim:
            return []
        return [("query", query, dim), ("key/value", kv, dim)][: 1 if kv == query else 2]

    def _head_fault(self, rule: Rule, target: Target, what: tuple[str, int, int]) -> Diagnostic:
        role, heads, dim = what
        query, tp = self.facts.num_heads, self.tp or 1
        name = "heads" if query == self.facts.num_kv_heads else f"{role} heads"
        help, notes = [], []
        if role == "key/value" and tp % heads == 0:
            parts = "parts=[q, kv, kv], " if target.path in self.facts.packed else ""
            times = tp // heads
            help.append(f"`colwise({parts}replicate={times})` keeps each head on {times} ranks")
        else:
            fits = ", ".join(str(d) for d in divisors(heads) if d > 1)
            help.append(f"tp must divide {heads}: {fits}" if fits else "leave its layers whole")
            help += self._ways_to_pad(rule, target, what)
        if role == "key/value" and query and query % tp == 0:
            notes.append(f"query heads ({query}) do divide by {tp}")
        return Diagnostic(
            "AS402",
            f"{heads} {name} can't be split over tp = {tp}",
            rule.span,
            f"{target.path}: {heads} heads x {dim}",
            tuple(help),
            tuple(notes),
        )

    def _ways_to_pad(self, rule: Rule, target: Target, what: tuple[str, int, int]) -> Iterator[str]:
        """Yield the `pad` that makes whole groups for each rank."""
        _, heads, dim = what
        query, kv, tp = self.facts.num_heads, self.facts.num_kv_heads, self.tp or 1
        groups = kv if query and kv and query % kv == 0 else heads
        if heads % groups:
            return
        unit = dim * heads // groups
        packing = self.facts.packed.get(target.path)
        if packing is not None:
            sizes = part_sizes(rule.style, sum(packing.parts), self.facts)
            unit = min(sizes) // groups if sizes else unit
        options = show_style(BLOCK["tensor"], _padded(rule.style, unit))
        padded, reading = -(-groups // tp) * tp * heads // groups, dim * (query or heads) // groups
        yield (
            f"`{options}` pads them to {padded} (checkpoints keep {heads}), with"
            f" `rowwise(pad={reading})` for the layer that reads attention"
        )

    def _widths(self, rule: Rule, target: Target, width: int) -> Iterator[Diagnostic]:
        """Yield AS401, AS405 or AS406 when a width or one of its parts doesn't divide."""
        sizes = part_sizes(rule.style, width, self.facts)
        if sizes is None:
            yield self._unknown_words(rule, target, width)
            return
        parts = rule.style.options.get("parts", 1)
        if sum(sizes) != width or (isinstance(parts, int) and width % parts):
            yield self._part_fault(rule, target, width, sizes)
        elif self.tp and "pad" not in rule.style.options:
            copies = rule.style.options.get("replicate", 1)
            assert isinstance(copies, int)
            bad = next((size for size in sizes if size * copies % self.tp), None)
            if bad is not None:
                yield self._width_fault(rule, target, bad)

    def _unknown_words(self, rule: Rule, target: Target, width: int) -> Diagnostic:
        message = f"`q` and `kv` say nothing here: {self.facts.class_name} states no heads"
        help = f"write the size of each part; together they make {width}"
        return Diagnostic("AS406", message, rule.span, self._shape(target), (help,))

    def _part_fault(
        self, rule: Rule, target: Target, width: int, sizes: tuple[int, ...]
    ) -> Diagnostic:
        parts = rule.style.options["parts"]
        if isinstance(parts, int):
            message = f"{width} can't be divided into {parts} equal parts"
            fits = ", ".join(str(d) for d in divisors(width, 6) if d > 1)
            help = f"parts one of: {fits}, or their sizes: `parts=[q, kv, kv]`"
        else:
            message = f"the parts {' + '.join(map(str, sizes))} make {sum(sizes)}, not {width}"
            help = "name the size of each part, or `q` and `kv` for all heads of a kind"
        return Diagnostic("AS406", message, rule.span, self._shape(target), (help,))

    def _width_fault(self, rule: Rule, target: Target, width: int) -> Diagnostic:
        tp = self.tp or 1
        if rule.style.name == "vocab":
            padded = -(-width // (128 * tp)) * 128 * tp
            help = f"`vocab(pad=128)` pads it to {padded} (checkpoints keep {width})"
            message = f"a vocabulary of {width} can't be split over tp = {tp}"
            return Diagnostic("AS401", message, rule.span, self._shape(target), (help,))
        side = "inputs" if rule.style.name == "rowwise" else "outputs"
        fits = ", ".join(str(d) for d in divisors(width) if d > 1)
        ways = [f"tp must divide {width}: {fits}" if fits else "leave it whole"]
        style = BLOCK["tensor"].style(rule.style.name)
        if style is not None and style.option("pad"):
            options = show_style(BLOCK["tensor"], _padded(rule.style))
            ways.append(f"or `{options}` pads them to {-(-width // tp) * tp}")
        return Diagnostic(
            "AS405",
            f"{width} {side} can't be split over tp = {tp}",
            rule.span,
            self._shape(target),
            tuple(ways),
        )

    def _shape(self, target: Target) -> str:
        return f"{target.weight} is {list(target.shape or ())}"

    def _ties(self, winners: Mapping[str, Rule]) -> Iterator[Diagnostic]:
        """Yield AS404 for tied weights that their modules would split differently."""
        for names in self.facts.ties:
            splits = {name: self._split_of(name, winners) for name in names}
            ruled = [name for name in names if splits[name] is not None]
            # A bias follows the layer that adds it, whoever else holds it.
            is_bias = len(self.facts.params[names[0]].shape) == 1
            asked = [n for n in names if self._rule_of(n, winners)[0]] if is_bias else names
            other = next((n for n in asked if ruled and splits[n] != splits[ruled[0]]), None)
            if other is not None:
                yield self._tie_fault(ruled[0], other, winners)

    def _split_of(self, fqn: str, winners: Mapping[str, Rule]) -> object:
        """Return how a name's weight would be stored; None when it stays whole."""
        rule, target = self._rule_of(fqn, winners)
        dim = target.split_dim(rule.style.name) if rule else None
        if rule is None or dim is None:
            return None
        return dim, rule.style.options.get("parts", 1), rule.style.options.get("pad")

    def _rule_of(self, fqn: str, winners: Mapping[str, Rule]) -> tuple[Rule | None, Target]:
        module = fqn.rpartition(".")[0]
        path = fqn if fqn in winners else module
        return winners.get(path), target_at(self.facts, module)

    def _tie_fault(self, fqn: str, other: str, winners: Mapping[str, Rule]) -> Diagnostic:
        rule, _ = self._rule_of(fqn, winners)
        against, target = self._rule_of(other, winners)
        assert rule is not None  # only names with a split are compared
        mine = show_style(BLOCK["tensor"], rule.style)
        theirs = f"is {show_style(BLOCK['tensor'], against.style)}" if against else "has no rule"
        return Diagnostic(
            "AS404",
            f"`{other}` and `{fqn}` are one tied weight but are split differently",
            rule.span,
            f"{mine} here; `{target.path}` {theirs}",
            (f"give both the same style: `{target.path}: {mine}`",),
        )


def _padded(style: Style, unit: int = 1) -> Style:
    return Style(style.name, {**style.options, "pad": unit})
