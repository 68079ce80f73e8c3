"""The parser that lark builds from plan.lark, and the walk from its trees to ours."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput, UnexpectedToken
from lark.lark import PostLex

from autoshard.dsl.tree import (
    Argument,
    Block,
    CallValue,
    DropItem,
    Include,
    Let,
    ListValue,
    Mark,
    PlanFile,
    Quantity,
    RuleItem,
    Scope,
    Setting,
    String,
    UseItem,
    Variable,
    Word,
)
from autoshard.source import Source, Span

HEADER = "autoshard 1\n"
# lark gives its trees' children no type of their own: trees and tokens, by the rule's name.
Node = Any

_COMMENT = re.compile(r"#[^\n]*")


class JoinLines(PostLex):
    """Drop the line ends inside `( )` and `[ ]`, so that lists and options may span lines."""

    always_accept = ("_NL",)

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        """Yield the tokens that the grammar sees."""
        depth = 0
        for token in stream:
            depth += (token.type in ("LPAR", "LSQB")) - (token.type in ("RPAR", "RSQB"))
            if token.type != "_NL" or depth <= 0:
                yield token


@dataclass(frozen=True)
class Lexeme:
    """Hold one token of the text: its kind, its text and where it stands."""

    type: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Stop:
    """Hold where parsing stopped: at a token, or at a character that begins none."""

    position: int
    token: Lexeme | None
    accepts: frozenset[str]


@dataclass(frozen=True)
class Attempt:
    """Hold how far one parse came: a tree, or the error and what was read before it."""

    tokens: tuple[Lexeme, ...]
    tree: Tree[Token] | None = None
    stop: Stop | None = None


@cache
def grammar() -> Lark:
    """Return the parser; building it costs more than parsing any plan, so it is built once."""
    return Lark(
        Path(__file__).with_name("plan.lark").read_text(encoding="utf-8"),
        parser="lalr",
        lexer="contextual",
        postlex=JoinLines(),
        propagate_positions=True,
        maybe_placeholders=False,
    )


def attempt(text: str) -> Attempt:
    """Parse `text` up to its end or its first error."""
    parser = grammar().parse_interactive(text)
    tokens: list[Lexeme] = []
    last = Token("_NL", "", start_pos=0, line=1, column=1)
    try:
        for last in parser.iter_parse():
            tokens.append(_lexeme(last))
        return Attempt(tuple(tokens), tree=parser.feed_eof(last))
    except UnexpectedInput as error:
        stop = _stop(error, text, frozenset(parser.accepts()))
        before = (token for token in tokens if token.end <= stop.position)
        return Attempt(tuple(t for t in before if t != stop.token), stop=stop)


def _lexeme(token: Token) -> Lexeme:
    start = token.start_pos or 0
    return Lexeme(token.type, str(token), start, start + len(token))


def _stop(error: UnexpectedInput, text: str, accepts: frozenset[str]) -> Stop:
    token = error.token if isinstance(error, UnexpectedToken) else None
    if token is not None and token.type == "$END":
        return Stop(len(text), None, accepts)
    return Stop(error.pos_in_stream or 0, _lexeme(token) if token else None, accepts)


def comments(text: str, tokens: tuple[Lexeme, ...]) -> Iterator[tuple[int, int]]:
    """Yield where comments stand: a `#` between tokens, not one inside a string."""
    end = 0
    for start, stop in [*((t.start, t.end) for t in tokens), (len(text), len(text))]:
        for match in _COMMENT.finditer(text, end, start):
            yield match.span()
        end = stop


@dataclass(frozen=True)
class TreeBuilder:
    """Turn lark's trees into ours; `shift` characters were put in front of the user's text."""

    source: Source
    shift: int = 0

    def file(self, tree: Node, tokens: tuple[Lexeme, ...], text: str) -> PlanFile:
        """Return the whole file."""
        header, *statements = tree.children
        found = comments(text, tokens)
        return PlanFile(
            str(header.children[0]),
            tuple(self.node(statement) for statement in statements),
            self.source,
            self.span(header),
            tuple(Span(self.source, a - self.shift, b - self.shift) for a, b in found),
        )

    def node(self, tree: Node) -> Any:
        """Return the node for one rule of the grammar: the method has the rule's name."""
        return getattr(self, f"_{tree.data}")(tree)

    def span(self, piece: Node) -> Span:
        """Return where a tree or a token stands in the user's text."""
        place: Any = piece if isinstance(piece, Token) else piece.meta
        return Span(self.source, place.start_pos - self.shift, place.end_pos - self.shift)

    def word(self, token: Token) -> Word:
        """Return a name or path; quotes make no difference."""
        return Word(_unquote(token), self.span(token))

    def _include(self, tree: Node) -> Include:
        path = tree.children[0]
        return Include(String(_unquote(path), self.span(path)), self.span(tree))

    def _let(self, tree: Node) -> Let:
        name, value = tree.children
        return Let(self.word(name), self.node(value), self.span(tree))

    def _block(self, tree: Node) -> Block:
        name, *on, body = tree.children
        where = self.word(on[0]) if on else None
        return Block(self.word(name), where, self._items(body), self.span(tree))

    def _items(self, body: Node) -> tuple:
        return tuple(self.node(item) for item in body.children)

    def _setting(self, tree: Node) -> Setting:
        key, value = tree.children
        return Setting(self.word(key), self.node(value), self.span(tree))

    def _rule(self, tree: Node) -> RuleItem:
        *mark, target, style = tree.children
        text: Mark = str(mark[0]) if mark else ""  # type: ignore[assignment]
        return RuleItem(text, self.node(target), self.node(style), self.span(tree))

    def _scope(self, tree: Node) -> Scope:
        target, body = tree.children
        return Scope(self.node(target), self._items(body), self.span(tree))

    def _use(self, tree: Node) -> UseItem:
        return UseItem(self.word(tree.children[0]), self.span(tree))

    def _drop(self, tree: Node) -> DropItem:
        return DropItem(self.node(tree.children[0]), self.span(tree))

    def _target(self, tree: Node) -> Word:
        return self.word(tree.children[0])

    def _call(self, tree: Node) -> CallValue:
        name, *args = tree.children
        given = args[0].children if args else ()
        return CallValue(_unquote(name), tuple(self._arg(a) for a in given), self.span(name))

    _style = _call

    def _arg(self, tree: Node) -> Argument:
        *name, value = tree.children
        word = self.word(name[0]) if name else None
        return Argument(word, self.node(value), self.span(tree))

    def _word(self, tree: Node) -> Word:
        return self.word(tree.children[0])

    def _quantity(self, tree: Node) -> Quantity:
        return Quantity(str(tree.children[0]), self.span(tree))

    def _string(self, tree: Node) -> String:
        return String(_unquote(tree.children[0]), self.span(tree))

    def _var(self, tree: Node) -> Variable:
        return Variable(str(tree.children[0])[1:], self.span(tree))

    def _list(self, tree: Node) -> ListValue:
        return ListValue(tuple(self.node(item) for item in tree.children), self.span(tree))


def _unquote(token: Token) -> str:
    return str(token)[1:-1] if token.type == "STRING" else str(token)
