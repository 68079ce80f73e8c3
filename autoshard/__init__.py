"""Compile a plain ``nn.Module`` and a plan file into parallel training programs.

Everything is imported lazily, so that commands that need no model never import torch.
"""

from pathlib import Path

__version__ = "0.1.0.dev0"

# In a bare checkout `passes/` and `dsl/` stand beside this package instead of inside it: let
# `autoshard.passes` and `autoshard.dsl` import from there, without an install.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").exists() and (_root / "passes").is_dir():
    __path__.append(str(_root))
