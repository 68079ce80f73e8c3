"""Import a script of examples/ by its path: several of them have equal names."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# A script that a test starts finds this checkout even where autoshard isn't installed.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def load(name: str) -> ModuleType:
    """Return the module at `examples/{name}.py`, loaded once."""
    unique = "example_" + name.replace("/", "_")
    if unique not in sys.modules:
        spec = importlib.util.spec_from_file_location(unique, EXAMPLES / f"{name}.py")
        assert spec and spec.loader
        sys.modules[unique] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[unique])
    return sys.modules[unique]
