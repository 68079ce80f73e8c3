"""Compile a plain ``nn.Module`` and a plan file into parallel training programs.

Everything is imported lazily, so that commands that need no model never import torch.
"""

from importlib import import_module
from pathlib import Path

__version__ = "0.1.0.dev0"

# In a bare checkout `passes/` and `dsl/` stand beside this package instead of inside it: let
# `autoshard.passes` and `autoshard.dsl` import from there, without an install.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").exists() and (_root / "passes").is_dir():
    __path__.append(str(_root))

_PUBLIC = {  # name -> the module that has it
    "Plan": "autoshard.python_plan",
    "lockstep": "autoshard.api",
    "parallelize": "autoshard.api",
}
__all__ = ["Plan", "lockstep", "parallelize"]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'autoshard' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """Return the public names as well."""
    return sorted([*globals(), *_PUBLIC])
