"""Variables: `let name = value`, used as `$name` anywhere below."""

from dataclasses import dataclass, field, replace

from autoshard.diagnostics import Diagnostic, Label, Severity
from autoshard.dsl.suggest import did_you_mean
from autoshard.dsl.tree import CallValue, Let, ListValue, Value, Variable


@dataclass
class Variables:
    """Hold the variables defined so far and which of them were used."""

    lets: dict[str, Let] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def define(self, let: Let) -> Diagnostic | None:
        """Add a variable; its value may use earlier ones."""
        name = let.name.text
        if name in self.lets:
            first = Label(self.lets[name].name.span, "first defined here")
            help = ("give one of them another name",)
            return Diagnostic(
                "AS111", f"`{name}` is defined twice", let.name.span, "", help, (), (first,)
            )
        value = self.substitute(let.value)
        if isinstance(value, Diagnostic):
            return value
        self.lets[name] = replace(let, value=value)
        return None

    def substitute(self, node: Value) -> Value | Diagnostic:
        """Return a value with every `$name` replaced, at any depth."""
        if isinstance(node, Variable):
            return self._lookup(node)
        if isinstance(node, ListValue):
            return self._in_list(node)
        if isinstance(node, CallValue):
            return self._in_call(node)
        return node

    def unused(self, source: object) -> tuple[Diagnostic, ...]:
        """Return a warning for each variable of one file that nothing used."""
        return tuple(
            Diagnostic(
                "AS112",
                f"`{name}` is never used",
                let.name.span,
                help=(f"use it as `${name}`, or remove the line",),
                severity=Severity.WARNING,
            )
            for name, let in self.lets.items()
            if name not in self.used and let.span.source is source
        )

    def _lookup(self, node: Variable) -> Value | Diagnostic:
        let = self.lets.get(node.text)
        if let is not None:
            self.used.add(node.text)
            return let.value
        near = did_you_mean(node.text, self.lets)
        help = tuple(text.replace("`", "`$", 1) for text in near)
        help += (f"define it: `let {node.text} = ...`",)
        message = f"unknown variable `${node.text}`"
        return Diagnostic("AS110", message, node.span, "not defined above", help)

    def _in_list(self, node: ListValue) -> Value | Diagnostic:
        items = []
        for item in node.items:
            value = self.substitute(item)
            if isinstance(value, Diagnostic):
                return value
            items.append(value)
        return replace(node, items=tuple(items))

    def _in_call(self, node: CallValue) -> Value | Diagnostic:
        args = []
        for arg in node.args:
            value = self.substitute(arg.value)
            if isinstance(value, Diagnostic):
                return value
            args.append(replace(arg, value=value))
        return replace(node, args=tuple(args))
