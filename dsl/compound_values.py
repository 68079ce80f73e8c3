"""The kinds of values that hold others: paths, lists of words, calls, parts of a packed weight."""

from dataclasses import dataclass, replace
from typing import Any

from autoshard.diagnostics import Diagnostic
from autoshard.dsl.nodes import quoted, text_of, wrong, wrong_word
from autoshard.dsl.tree import CallValue, ListValue, Quantity, String, Value, Word
from autoshard.dsl.values import Enum, Integer
from autoshard.plan import Call


@dataclass(frozen=True)
class Globs:
    """One module path, or a list of them; or one of some words."""

    words: tuple[str, ...] = ()

    def read(self, name: str, node: Value) -> object:
        """Return a tuple of paths, or the word."""
        if isinstance(node, Word) and node.text in self.words:
            return node.text
        nodes = node.items if isinstance(node, ListValue) else (node,)
        bad = next((part for part in nodes if not isinstance(part, Word | String)), None)
        if bad is not None:
            return wrong(bad, "AS120", f"`{name}` needs {self.describe()}")
        return tuple(text_of(part) for part in nodes)

    def show(self, value: Any) -> str:
        """Return the path, or the list."""
        if isinstance(value, str):
            return value
        paths = [quoted(path) for path in value]
        return paths[0] if len(paths) == 1 else f"[{', '.join(paths)}]"

    def describe(self) -> str:
        """Return the forms."""
        words = "".join(f"`{word}`, or " for word in self.words)
        return f"{words}a module path or a list of them"


@dataclass(frozen=True)
class WordList:
    """A list of words, each one of some."""

    words: tuple[str, ...]

    def read(self, name: str, node: Value) -> object:
        """Return the words as a tuple."""
        nodes = node.items if isinstance(node, ListValue) else (node,)
        wrong = (part for part in nodes if text_of(part) not in self.words)
        bad = next(wrong, None)
        return wrong_word(name, bad, self.words) if bad else tuple(text_of(part) for part in nodes)

    def show(self, value: Any) -> str:
        """Return the list."""
        return f"[{', '.join(value)}]"

    def describe(self) -> str:
        """Return the words."""
        return f"a list of: {', '.join(self.words)}"


@dataclass(frozen=True)
class Calls:
    """One of some calls with paths as arguments, or one of some words.

    `calls` maps each name to the words that its named options take.
    """

    calls: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...]
    words: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()  # calls whose arguments are quoted file names

    def read(self, name: str, node: Value) -> object:
        """Return a `Call`, or the word."""
        known = dict(self.calls)
        text = node.name if isinstance(node, CallValue) else text_of(node)
        if isinstance(node, Word | Quantity) and text in self.words:
            return text
        if isinstance(node, Word) and text in known:
            return wrong(
                node, "AS120", f"`{text}` needs arguments", "", (f"write {self._form(text)}",)
            )
        if not isinstance(node, CallValue) or text not in known:
            forms = tuple(self._form(call).strip("`") for call in known)
            fault = wrong_word(name, node, (*self.words, *known))
            shown = f"one of: {', '.join((*self.words, *forms))}"
            return replace(fault, help=(*fault.help[:-1], shown))
        return self._call(node, dict(known[text]))

    def _call(self, node: CallValue, options: dict[str, tuple[str, ...]]) -> object:
        args: list[str] = []
        named: dict[str, object] = {}
        for arg in node.args:
            if arg.name is None and isinstance(arg.value, Word | String):
                args.append(arg.value.text)
            elif arg.name is not None and arg.name.text in options:
                word = Enum(options[arg.name.text]).read(arg.name.text, arg.value)
                if isinstance(word, Diagnostic):
                    return word
                named[arg.name.text] = word
            else:
                label = f"write {self._form(node.name)}"
                return wrong(
                    arg.name or arg.value, "AS124", f"`{node.name}` can't take this", label
                )
        if bool(args) == bool(options):  # calls with options take no paths, the others need one
            return wrong(node, "AS124", f"`{node.name}` needs {self._form(node.name)}")
        defaults = {option: words[0] for option, words in options.items()}
        return Call(node.name, tuple(args), defaults | named)

    def _form(self, call: str) -> str:
        options = dict(self.calls)[call]
        inside = ", ".join(f"{name}={'|'.join(words)}" for name, words in options)
        paths = '"FILE"' if call in self.texts else "PATH, ..."
        return f"`{call}({inside or paths})`"

    def show(self, value: Any) -> str:
        """Return the call, or the word."""
        if isinstance(value, str):
            return value
        quote = (lambda text: f'"{text}"') if value.name in self.texts else quoted
        args = [quote(arg) for arg in value.args]
        args += [f"{name}={word}" for name, word in value.options.items()]
        return f"{value.name}({', '.join(args)})"

    def describe(self) -> str:
        """Return the forms."""
        return " | ".join([*self.words, *(self._form(call).strip("`") for call, _ in self.calls)])


@dataclass(frozen=True)
class Parts:
    """How a packed weight is divided: a number of equal parts, or the size of each.

    A size is a number of outputs, or `q` or `kv`: as many as all query or key/value heads have.
    """

    words: tuple[str, ...] = ("q", "kv")

    def read(self, name: str, node: Value) -> object:
        """Return the number, or the sizes as a tuple."""
        if not isinstance(node, ListValue):
            return Integer(1).read(name, node)
        sizes = tuple(Integer(1, words=self.words).read(name, item) for item in node.items)
        return next((size for size in sizes if isinstance(size, Diagnostic)), sizes)

    def show(self, value: Any) -> str:
        """Return the number, or the list."""
        return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)

    def describe(self) -> str:
        """Return the forms."""
        return "a number of equal parts, or their sizes: `[q, kv, kv]`"
