"""The parser that lark builds from plan.lark, and the walk from its trees to ours."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput
from lark.lark import PostLex

from autoshard.dsl.tree import (
    Argument,
    Block,
    CallValue,
    DropItem,
    Include,
    Let,
    ListValue,
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
class Attempt:
    """Hold how far one parse came: a tree, or the error and what was read before it."""

    tokens: tuple[Token, ...]
    tree: Tree | None = None
    error: UnexpectedInput | None = None
    accepts: frozenset[str] = frozenset()


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
    tokens: list[Token] = []
    try:
        for token in parser.iter_parse():
            tokens.append(token)
        last = tokens[-1] if tokens else Token("_NL", "", start_pos=0, line=1, column=1)
        return Attempt(tuple(tokens), tree=parser.feed_eof(last))
    except UnexpectedInput as error:
        accepts = frozenset(parser.accepts())
        return Attempt(tuple(tokens), error=error, accepts=accepts)


def comments(text: str, tokens: tuple[Token, ...]) -> Iterator[tuple[int, int]]:
    """Yield where comments stand: a `#` between tokens, not one inside a string."""
    end = 0
    for start, stop in [*((t.start_pos, t.end_pos) for t in tokens), (len(text), len(text))]:
        for match in _COMMENT.finditer(text, end, start):
            yield match.span()
        end = stop


@dataclass(frozen=True)
class TreeBuilder:
    """Turn lark's trees into ours; `shift` characters were put in front of the user's text."""

    source: Source
    shift: int = 0

    def file(self, tree: Tree, tokens: tuple[Token, ...], text: str) -> PlanFile:
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

    def node(self, tree: Tree) -> Any:
        """Return the node for one rule of the grammar: the method has the rule's name."""
        return getattr(self, f"_{tree.data}")(tree)

    def span(self, piece: Tree | Token) -> Span:
        """Return where a tree or a token stands in the user's text."""
        place = piece if isinstance(piece, Token) else piece.meta
        return Span(self.source, place.start_pos - self.shift, place.end_pos - self.shift)

    def word(self, token: Token) -> Word:
        """Return a name or path; quotes make no difference."""
        return Word(_unquote(token), self.span(token))

    def _include(self, tree: Tree) -> Include:
        path = tree.children[0]
        return Include(String(_unquote(path), self.span(path)), self.span(tree))

    def _let(self, tree: Tree) -> Let:
        name, value = tree.children
        return Let(self.word(name), self.node(value), self.span(tree))

    def _block(self, tree: Tree) -> Block:
        name, *on, body = tree.children
        where = self.word(on[0]) if on else None
        return Block(self.word(name), where, self._items(body), self.span(tree))

    def _items(self, body: Tree) -> tuple:
        return tuple(self.node(item) for item in body.children)

    def _setting(self, tree: Tree) -> Setting:
        key, value = tree.children
        return Setting(self.word(key), self.node(value), self.span(tree))

    def _rule(self, tree: Tree) -> RuleItem:
        *mark, target, style = tree.children
        text = str(mark[0]) if mark else ""
        return RuleItem(text, self.node(target), self.node(style), self.span(tree))

    def _scope(self, tree: Tree) -> Scope:
        target, body = tree.children
        return Scope(self.node(target), self._items(body), self.span(tree))

    def _use(self, tree: Tree) -> UseItem:
        return UseItem(self.word(tree.children[0]), self.span(tree))

    def _drop(self, tree: Tree) -> DropItem:
        return DropItem(self.node(tree.children[0]), self.span(tree))

    def _target(self, tree: Tree) -> Word:
        return self.word(tree.children[0])

    def _call(self, tree: Tree) -> CallValue:
        name, *args = tree.children
        given = args[0].children if args else ()
        return CallValue(_unquote(name), tuple(self._arg(a) for a in given), self.span(name))

    _style = _call

    def _arg(self, tree: Tree) -> Argument:
        *name, value = tree.children
        word = self.word(name[0]) if name else None
        return Argument(word, self.node(value), self.span(tree))

    def _word(self, tree: Tree) -> Word:
        return self.word(tree.children[0])

    def _quantity(self, tree: Tree) -> Quantity:
        return Quantity(str(tree.children[0]), self.span(tree))

    def _string(self, tree: Tree) -> String:
        return String(_unquote(tree.children[0]), self.span(tree))

    def _var(self, tree: Tree) -> Variable:
        return Variable(str(tree.children[0])[1:], self.span(tree))

    def _list(self, tree: Tree) -> ListValue:
        return ListValue(tuple(self.node(item) for item in tree.children), self.span(tree))


def _unquote(token: Token) -> str:
    return str(token)[1:-1] if token.type == "STRING" else str(token)
