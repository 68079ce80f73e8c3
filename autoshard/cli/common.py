"""What several commands share: common options, and the model that `--model` names."""

import argparse
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from autoshard.diagnostics import AutoshardError, Diagnostic, Severity, render

MODEL_HELP = "where the model comes from: pkg.module:function or file.py:function, a function "
MODEL_HELP += "without arguments that returns (model, batch) or (model, batch, loss)"

STRICT_HELP = "make errors of the plan's warnings and, with --model, of operators without a "
STRICT_HELP += "placement rule"


class ModelError(AutoshardError):
    """Report a `--model` that can't be found, fails, or returns something else."""


class UsageError(AutoshardError):
    """Report options that don't go together, or one that is missing; exits with 2."""

    exit_code = 2


@dataclass(frozen=True)
class Built:
    """Hold what the function behind `--model` returned."""

    model: Any
    batch: Any = None
    loss: Any = None


def add_common(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that every command has."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add `--model`."""
    parser.add_argument("--model", metavar="P:F", required=required, help=MODEL_HELP)


def add_world(parser: argparse.ArgumentParser) -> None:
    """Add `--world`."""
    parser.add_argument("--world", type=positive, metavar="N", help="number of processes")


def positive(text: str) -> int:
    """Read a whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def build_model(spec: str) -> Built:
    """Import and call what `--model` names.

    Raises `ModelError` with the place in the user's file where it failed.
    """
    function = _function(spec)
    try:
        result = function()
    except Exception as error:
        raise ModelError(
            f"building the model failed: {type(error).__name__}: {error}",
            notes=_place(error),
            help="`--debug` shows the traceback",
        ) from error
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not hasattr(parts[0], "named_modules"):
        kinds = ", ".join(type(part).__name__ for part in parts)
        help = "return (model, batch) or (model, batch, loss)"
        raise ModelError(f"`{spec}` returned ({kinds})", help=help)
    return Built(*parts)


def print_diagnostics(diagnostics: Iterable[Diagnostic], file: TextIO | None = None) -> None:
    """Print each with an empty line behind it, to standard output unless told otherwise."""
    for diagnostic in diagnostics:
        print(render(diagnostic), end="\n\n", file=file)


def count(diagnostics: Iterable[Diagnostic]) -> tuple[int, int]:
    """Return how many are errors and how many warnings."""
    severities = [diagnostic.severity for diagnostic in diagnostics]
    return severities.count(Severity.ERROR), severities.count(Severity.WARNING)


def _function(spec: str) -> Callable[[], Any]:
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        help = "write --model pkg.module:function or --model file.py:function"
        raise ModelError(f"`--model {spec}` names no function", help=help)
    module = _module_from_file(place) if place.endswith(".py") else _module_by_name(place)
    found = getattr(module, name, None)
    if not callable(found):
        public = [n for n, v in vars(module).items() if callable(v) and n[0] != "_"]
        help = f"it has: {', '.join(public[:12])}" if public else "it has no functions"
        raise ModelError(f"`{place}` has no function `{name}`", help=help)
    return found


def _module_from_file(place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        raise ModelError(f"can't find the file `{place}` that `--model` names")
    name = f"_autoshard_model_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"can't import `{place}`")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` would
    run = partial(spec.loader.exec_module, module)
    _import(place, run)
    return module


def _module_by_name(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` would
    return _import(name, partial(import_module, name))


def _import(name: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        raise ModelError(
            f"importing `{name}` failed: {type(error).__name__}: {error}", notes=_place(error)
        ) from error


def _place(error: Exception) -> tuple[str, ...]:
    """Return where in the user's code an error came from: its deepest frame outside packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and f.filename != __file__]
    own = [f for f in own if not f.filename.startswith("<frozen")]
    return (f"at {own[-1].filename}:{own[-1].lineno}",) if own else ()
