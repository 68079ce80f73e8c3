"""The house rules as functions from a source tree to findings.

Each takes the root of a checkout and returns one line per breach, so that the same function judges
this repository and the small broken trees that test_house_rules_bite plants.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("autoshard", "passes", "dsl")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

# One line a layer, lowest first. A room imports from its own layer and the lower ones, except for
# the pairs in FORBIDDEN; only in the top layer do compiler, passes and runtime meet.
LAYERS = (
    ("source", "diagnostics", "units", "collector"),
    ("mesh", "plan", "model_facts", "schedule"),
    ("compat", "ops", "dsl", "_native"),
    ("ir",),
    ("cost", "proof", "cache"),
    ("compiler",),
    ("passes", "runtime"),
    ("cli", "testing", "api", "frontend", "programs", "python_plan", "verify", "__main__", ""),
)
LAYER = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FORBIDDEN = {
    "runtime": {"dsl", "compiler", "passes"},
    "passes": {"runtime"},
    "ops": {"dsl"},
    "dsl": {"ops", "compat", "_native"},
}
TORCH_FREE = {
    "source",
    "diagnostics",
    "units",
    "collector",
    "mesh",
    "plan",
    "model_facts",
    "schedule",
    "dsl",
}
HEAVY = {"torch", "transformers", "numpy"}
STDLIB_ONLY = {"source", "diagnostics", "units", "collector"}
# Rooms whose functions may import: cli answers without torch, ops tries the native library.
LATE_IMPORTS = {"cli", "ops", "testing", "__main__", ""}
PASS_FILES_WITHOUT_PASS = {"__init__", "pipelines"}

# What belongs to one machine or to how the work is organised, not to the project. Written in pieces
# so that this file passes its own rule.
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".plan", ".case", ".cpp", ".cu", ".h", ".lark", ""}
FOREIGN_WORDS = re.compile(
    r"(?<![\w.])/(?:work|root|home|opt|mnt|Users)/\w|\bwork"
    r"tree\b|\bissue #?\d|\b(?:pypi|pythonhosted|download\.pytorch|npmjs)\.(?:org|com)\b"
)
VISIBLE_DOT_FOLDERS = {".ci"}
GENERATED_FOLDERS = {"build", "dist", "__pycache__"}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported module, where it stands, and whether inside a function."""

    target: str
    line: int
    inside: bool
    relative: bool = False


def python_files(root: Path, folders: Iterable[str]) -> Iterator[Path]:
    """Yield the Python files below the named folders, in a fixed order."""
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def room_of(root: Path, path: Path) -> str:
    """Return the room a file belongs to; the package's own `__init__` is the room ''."""
    parts = path.relative_to(root).with_suffix("").parts
    if parts[0] != "autoshard":
        return parts[0]
    return "" if parts[1] == "__init__" else parts[1]


def imports_of(tree: ast.Module) -> Iterator[Import]:
    """Yield every import statement's targets, with `from a import b` as `a.b`."""
    inside = {id(node) for function in _functions(tree) for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, id(node) in inside)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                target = f"{node.module or ''}.{alias.name}"
                yield Import(target, node.lineno, id(node) in inside, node.level > 0)


def layer_findings(root: Path) -> list[str]:
    """Return imports that go up or across the layers, or load torch where it must not be."""
    findings = []
    for path in python_files(root, PACKAGES):
        room = room_of(root, path)
        where = path.relative_to(root)
        if room not in LAYER:
            findings.append(f"{where}: `{room}` has no place in the layer table")
            continue
        for imported in imports_of(ast.parse(path.read_text())):
            fault = _import_fault(root, path, room, imported)
            if fault:
                findings.append(f"{where}:{imported.line}: {fault}")
    return findings


def late_import_findings(root: Path) -> list[str]:
    """Return imports inside functions outside the rooms that need them."""
    return [
        f"{path.relative_to(root)}:{imported.line}: import of `{imported.target}` in a function"
        for path in python_files(root, PACKAGES)
        if room_of(root, path) not in LATE_IMPORTS
        for imported in imports_of(ast.parse(path.read_text()))
        if imported.inside
    ]


def size_findings(root: Path, folders: Iterable[str]) -> list[str]:
    """Return files and functions over the size limits."""
    findings = []
    for path in python_files(root, folders):
        text = path.read_text()
        lines = len(text.splitlines())
        if lines > MAX_FILE_LINES:
            findings.append(f"{path.relative_to(root)}: {lines} lines, limit {MAX_FILE_LINES}")
        for function in _functions(ast.parse(text)):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > MAX_FUNCTION_LINES:
                place = f"{path.relative_to(root)}:{function.lineno}"
                findings.append(
                    f"{place}: `{function.name}` has {length} lines, limit {MAX_FUNCTION_LINES}"
                )
    return findings


def docstring_findings(root: Path) -> list[str]:
    """Return public modules, classes and functions without a docstring."""
    findings = []
    for path in python_files(root, PACKAGES):
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            findings.append(f"{path.relative_to(root)}:1: module without a docstring")
        findings += [
            f"{path.relative_to(root)}:{node.lineno}: `{node.name}` without a docstring"
            for node in _public(tree.body)
            if not ast.get_docstring(node)
        ]
    return findings


def annotation_findings(root: Path) -> list[str]:
    """Return functions without a return annotation."""
    return [
        f"{path.relative_to(root)}:{function.lineno}: `{function.name}` without a return annotation"
        for path in python_files(root, PACKAGES)
        for function in _functions(ast.parse(path.read_text()))
        if function.returns is None
    ]


def case_findings(root: Path) -> list[str]:
    """Return passes that no case file, or no error case, names."""
    cases = root / "tests" / "cases"
    findings = []
    for path in sorted((root / "passes").glob("*.py")):
        if path.stem in PASS_FILES_WITHOUT_PASS or path.stem.startswith("_"):
            continue
        name = path.stem.replace("_", "-")
        for kind, folder in (("case", cases), ("error case", cases / "errors")):
            if not any(_names_word(case.read_text(), name) for case in folder.glob("*.case")):
                findings.append(f"passes/{path.name}: no {kind} names `{name}`")
    return findings


def word_findings(root: Path) -> list[str]:
    """Return lines that name one machine's paths, a registry's host or how work is organised."""
    findings = []
    for path in sorted(root.rglob("*")):
        where = path.relative_to(root)
        if where.suffix not in TEXT_SUFFIXES or not path.is_file() or _is_generated(where):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            match = FOREIGN_WORDS.search(line)
            if match:
                findings.append(f"{where}:{number}: `{match[0]}`")
    return findings


def _is_generated(where: Path) -> bool:
    """Return whether a file belongs to a cache, an environment or a build."""
    dotted = {part for part in where.parts if part.startswith(".")} - VISIBLE_DOT_FOLDERS
    generated = {part for part in where.parts if part.endswith(".egg-info")} | (
        GENERATED_FOLDERS & set(where.parts)
    )
    return bool(dotted or generated)


def _import_fault(root: Path, path: Path, room: str, imported: Import) -> str | None:
    """Return what is wrong with one import, or None."""
    if imported.relative:
        return "relative import: write the absolute name"
    head = imported.target.split(".")[0]
    if head in ("passes", "dsl", "csrc", "tests"):
        return f"`{head}` imported by its folder: write `autoshard.{head}`"
    if head != "autoshard":
        return _outside_fault(room, head)
    target = _target_room(imported.target)
    if target == room == "passes":
        return _pass_fault(path, imported.target)
    if target == room:
        return None
    if target in FORBIDDEN.get(room, ()):
        return f"`{room}` never imports `{target}`"
    if LAYER[target] <= LAYER[room]:
        return None
    upper = f"`{target or 'autoshard'}` (layer {LAYER[target]})"
    return f"`{room}` (layer {LAYER[room]}) imports {upper}"


def _outside_fault(room: str, head: str) -> str | None:
    if room in TORCH_FREE and head in HEAVY:
        return f"`{room}` is free of {head}"
    if room in STDLIB_ONLY and head not in sys.stdlib_module_names:
        return f"`{room}` uses the standard library only, not `{head}`"
    return None


def _pass_fault(path: Path, target: str) -> str | None:
    """A pass stands alone; only the files that list passes import them."""
    parts = target.split(".")
    other = parts[2] if len(parts) > 2 else ""
    alone = path.stem not in PASS_FILES_WITHOUT_PASS
    if alone and other != path.stem and not other.startswith("_"):
        return f"a pass never imports another pass (`{other}`)"
    return None


def _target_room(target: str) -> str:
    parts = target.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYER else ""


def _functions(tree: ast.AST) -> list[FunctionNode]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def _public(body: list[ast.stmt]) -> Iterator[FunctionNode | ast.ClassDef]:
    """Yield public definitions of a body and, below public classes, their members."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_") or _is_overload(node):
            continue
        yield node
        if isinstance(node, ast.ClassDef):
            yield from _public(node.body)


def _is_overload(node: FunctionNode | ast.ClassDef) -> bool:
    return any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


def _names_word(text: str, name: str) -> bool:
    words = set(text.replace(",", " ").replace("{", " ").replace(">", " ").split())
    return name in words
