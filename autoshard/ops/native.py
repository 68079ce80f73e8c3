"""The compiled kernels, if they were built, and why not where they were not.

``autoshard._native`` (CPU) and ``autoshard._native_cuda`` are optional: every op has a reference
in torch ops and works without them.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class NativeLibrary:
    """One optional compiled module: the module itself, or the reason why there is none."""

    name: str
    module: ModuleType | None
    reason: str  # empty when the module was loaded


def _load(name: str) -> NativeLibrary:
    try:
        return NativeLibrary(name, importlib.import_module(name), "")
    except ImportError as error:
        # A missing library is a supported way to run; `autoshard env` prints the reason.
        return NativeLibrary(name, None, _explain(name, error))


def _explain(name: str, error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return "not built"
    return f"built but does not load: {error}"


CPU = _load("autoshard._native")
CUDA = _load("autoshard._native_cuda")
