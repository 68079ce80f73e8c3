"""File cases: a model, a plan and a pass in one text file, with the print they must give.

    # what the case shows, in a sentence
    model: tiny_gpt(layers=1)
    world: 2
    until: tensor
    show: forward
    --- plan
    autoshard 1
    ...
    --- print
    ...
    --- remarks
    ...

``model`` calls a builder of ``autoshard.testing.models``. ``show`` names a graph of the program
("forward", "stage0.F", "schedule"); ``paths`` (optional) keeps only lines under module paths that
match a glob. An error case has ``--- error`` instead, with the whole message.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from autoshard.diagnostics import AutoshardError
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.printer import print_function
from autoshard.source import Source
from autoshard.testing import models


@dataclass(frozen=True)
class Case:
    """One parsed case file."""

    title: str
    header: dict[str, str]
    sections: dict[str, str]

    def __str__(self) -> str:
        lines = [f"# {self.title}", *(f"{k}: {v}" for k, v in self.header.items())]
        for name, text in self.sections.items():
            lines += [f"--- {name}", text.strip("\n")]
        return "\n".join(lines) + "\n"


def read_case(path: Path) -> Case:
    """Return the case in a file."""
    head, *parts = path.read_text().split("\n--- ")
    title, *lines = head.splitlines()
    header = dict(line.split(": ", 1) for line in lines if line.strip())
    sections = {name: text.strip("\n") for name, _, text in (p.partition("\n") for p in parts)}
    return Case(title.removeprefix("# "), header, sections)


def run_case(case: Case) -> Case:
    """Return the case with its sections as this version of the code gives them."""
    produced = {"plan": case.sections["plan"]}
    try:
        produced |= _compile(case)
    except AutoshardError as error:
        produced["error"] = str(error)
    return replace(case, sections=produced)


def _compile(case: Case) -> dict[str, str]:
    model, batch, loss = build_model(case.header["model"])
    plan = load(Source("case.plan", case.sections["plan"] + "\n")).require()
    until = case.header.get("until")
    world = int(case.header["world"]) if "world" in case.header else None
    compiled = compile_plan(model, plan, batch, loss, world_size=world, until=until)
    shown = case.header.get("show", "forward")
    if shown == "schedule":
        text = str(compiled.program.schedule)
    else:
        text = print_function(dict(compiled.program.functions())[shown])
    remarks = [r for r in compiled.remarks if r.pass_name == until or until is None]
    sections = {"print": _under(text, case.header.get("paths"))}
    if remarks:
        sections["remarks"] = "\n".join(map(str, remarks))
    return sections


def build_model(text: str) -> tuple:
    """Return (model, batch, loss) of a call of a builder of ``autoshard.testing.models``.

    Only names of builders and literal keyword arguments are read; nothing is evaluated.
    """
    call = ast.parse(text, mode="eval").body
    keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    return getattr(models, call.func.id)(**keywords)


def _under(text: str, glob: str | None) -> str:
    if glob is None:
        return text
    lines = [line for line in text.splitlines() if fnmatchcase(line.split(":", 1)[0].strip(), glob)]
    return "\n".join(lines)
