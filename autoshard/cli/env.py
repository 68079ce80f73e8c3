"""`autoshard env`: versions, devices and which kernels were built, for bug reports."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
from importlib import metadata
from typing import TYPE_CHECKING

from autoshard import __version__
from autoshard.cache.store import VARIABLE, default_folder
from autoshard.cli.common import add_common

if TYPE_CHECKING:
    from autoshard.ops.native import NativeLibrary

OPTIONAL_PACKAGES = ("transformers", "lark", "pybind11")
COMPILERS = ("c++", "g++", "clang++")
REBUILD = "reinstall autoshard to build them (pip install -v shows the compiler's words)"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = subparsers.add_parser("env", help="print versions, devices and built kernels")
    add_common(parser).add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line a fact."""
    found = facts()
    if args.json:
        print(json.dumps(found))
        return 0
    width = max(len(name) for name in found)
    print("\n".join(f"{name:{width}}  {value}" for name, value in found.items()))
    return 0


def facts() -> dict[str, str]:
    """Return what a bug report needs to know about this installation, in the order to print."""
    import torch

    from autoshard.ops import native

    return {
        "autoshard": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}",
        **{name: _version(name) for name in OPTIONAL_PACKAGES},
        "devices": _devices(),
        "backend": "nccl" if torch.cuda.is_available() else "gloo",
        "cpu threads": str(torch.get_num_threads()),
        "cpu kernels": _cpu_kernels(native.CPU),
        "cuda kernels": _cuda_kernels(native.CUDA),
        "program cache": _cache(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cache() -> str:
    folder = default_folder()
    return f"off ({VARIABLE})" if folder is None else str(folder)


def _devices() -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    return ", ".join(names) or "no CUDA device"


def _cpu_kernels(library: NativeLibrary) -> str:
    if library.module is not None:
        best, *others = library.module.instruction_sets().split()
        return f"built; this machine runs {best}" + (
            f" (also {' '.join(others)})" if others else ""
        )
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    cause = f"'{found}' is on PATH" if found else f"none of {', '.join(COMPILERS)} is on PATH"
    advice = "install a C++ compiler, then " * (found is None) + REBUILD
    return f"{library.reason}; torch ops run instead; {cause}: {advice}"


def _cuda_kernels(library: NativeLibrary) -> str:
    if library.module is not None:
        return f"built for {library.module.architectures()}"
    nvcc = shutil.which("nvcc")
    cause = "'nvcc' is on PATH" if nvcc else "'nvcc' is not on PATH"
    advice = "install the CUDA toolkit, then " * (nvcc is None) + f"with AUTOSHARD_CUDA=1 {REBUILD}"
    return f"{library.reason}; torch ops run instead; {cause}: {advice}"
