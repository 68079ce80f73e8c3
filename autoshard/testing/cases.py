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
("forward", "stage0.F"), "params" or "schedule". ``paths`` (optional) keeps only lines whose name
matches one of its globs. ``passes`` (optional) spells another pipeline than the default one:
``canonicalize > fuse-add-layer-norm``. An error case has ``--- error`` instead of the rest, with
the whole message.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from autoshard.compiler.pipeline import Pipeline
from autoshard.diagnostics import AutoshardError
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.params import Flat, ParamSpec
from autoshard.ir.printer import dtype_text, print_function
from autoshard.ir.program import Program
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
    spelled = case.header.get("passes")
    pipeline = Pipeline.parse(spelled.replace(" > ", "\n")) if spelled else None
    compiled = compile_plan(
        model, plan, batch, loss, world_size=world, until=until, pipeline=pipeline
    )
    text = _shown(compiled.program, case.header.get("show", "forward"))
    remarks = [r for r in compiled.remarks if r.pass_name == until or until is None]
    sections = {"print": _under(text, case.header.get("paths"))}
    if remarks:
        sections["remarks"] = "\n".join(map(str, remarks))
    return sections


def build_model(text: str) -> tuple:
    """Return (model, batch, loss) of a call of a builder of ``autoshard.testing.models``.

    Only names of builders and literal arguments are read; nothing is evaluated.
    """
    call = ast.parse(text, mode="eval").body
    args = [ast.literal_eval(value) for value in call.args]
    keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    return getattr(models, call.func.id)(*args, **keywords)


def _shown(program: Program, name: str) -> str:
    """Return what a case shows of a program, as text."""
    if name == "schedule":
        return str(program.schedule)
    if name == "params":
        return "\n".join(map(_param_text, program.params))
    return print_function(dict(program.functions())[name])


def _param_text(spec: ParamSpec) -> str:
    """Return one line about a parameter: names, type, placements, stages and place in storage."""
    shape = f"{dtype_text(spec.dtype)}{list(spec.shape)}"
    if spec.padded:
        shape += f" padded to {list(spec.padded)}"
    if spec.copies:
        shape += f" {spec.copies.times} copies of each of {spec.copies.pieces} heads"
    placed = "".join(f" {placement}@{axis}" for axis, placement in spec.placements.items())
    parts = [f"{' = '.join((spec.fqn, *spec.aliases))}: {shape}{placed}"]
    if spec.homes:
        parts.append(f"stage {' and '.join(map(str, spec.homes))}")
    if spec.storage.bucket:
        parts.append(f"in {spec.storage.bucket} at {spec.storage.offset}")
    if isinstance(spec.storage, Flat):
        parts.append(f"cut over {spec.storage.axis}")
    return ", ".join(parts)


def _under(text: str, globs: str | None) -> str:
    if globs is None:
        return text
    wanted = [glob.strip() for glob in globs.split(",")]
    return "\n".join(
        line
        for line in text.splitlines()
        if any(fnmatchcase(line.split(":", 1)[0].strip(), glob) for glob in wanted)
    )
