"""Build the optional kernels: `autoshard._native` (CPU) and `autoshard._native_cuda` (CUDA).

Everything else about the package is in pyproject.toml.  Both modules are optional: where a compiler
is missing or fails, the install goes on without them, says so, and `autoshard env` repeats it.
CUDA code takes a minute to compile: it is built where both `nvcc` and an NVIDIA device are found.
AUTOSHARD_CUDA=1 builds it wherever `nvcc` is, AUTOSHARD_CUDA=0 nowhere.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

try:
    from pybind11 import get_include
except ImportError:  # only without build isolation: then nothing native is built
    get_include = None

CPU_FLAGS = ["-std=c++17", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wno-maybe-uninitialized"]
# Machine code for each, and PTX of the last for whatever comes after.
ARCHITECTURES = ("80", "90")
TARGETS = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
TARGETS += [f"-gencode=arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}"]
ARCHITECTURE_NAMES = " ".join(f"sm_{number}" for number in ARCHITECTURES) + ", PTX"
CUDA_FLAGS = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "--threads=2"]
HEADERS = [str(path) for path in sorted(Path("csrc").glob("*.h"))]


def cuda_root(nvcc: str) -> Path:
    """Return the toolkit's folder; `nvcc` itself may be a wrapper script elsewhere."""
    plan = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
    )
    found = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
    if found is None:
        raise CompileError(f"'{nvcc} --dryrun' does not say where the CUDA toolkit is")
    return Path(found.group(1)).resolve()


class BuildNative(build_ext):
    """Compile C++ as usual and `.cu` files by nvcc; report what could not be built."""

    def build_extension(self, ext: Extension) -> None:
        """Build one extension, compiling its CUDA sources first."""
        kernels = [source for source in ext.sources if source.endswith(".cu")]
        if kernels:
            ext.sources = [source for source in ext.sources if not source.endswith(".cu")]
            nvcc = shutil.which("nvcc") or "nvcc"
            ext.extra_objects = [self._compile_cuda(nvcc, source) for source in kernels]
            libraries = cuda_root(nvcc)
            ext.library_dirs = [str(libraries / "lib64"), str(libraries / "lib")]
        super().build_extension(ext)

    def _compile_cuda(self, nvcc: str, source: str) -> str:
        target = Path(self.build_temp) / f"{source}.o"
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [nvcc, *CUDA_FLAGS, *TARGETS, "-c", source, "-o", str(target)]
        try:
            self.spawn(command)
        except Exception as error:  # whatever nvcc's failure looks like, the extension is optional
            raise CompileError(f"nvcc could not compile {source}: {error}") from error
        return str(target)


def wants_cuda() -> bool:
    """Return whether to build the CUDA module, which AUTOSHARD_CUDA=0 or 1 decides if set."""
    choice = os.environ.get("AUTOSHARD_CUDA", "")
    has_device = Path("/dev/nvidiactl").exists()
    return shutil.which("nvcc") is not None and (choice == "1" or (choice == "" and has_device))


def extensions() -> list[Extension]:
    """Return the extensions that this machine can try to build."""
    if get_include is None:
        return []
    shared = {"include_dirs": [get_include()], "depends": HEADERS, "optional": True}
    cpu = Extension(
        "autoshard._native",
        ["csrc/bindings.cpp", "csrc/add_layer_norm.cpp"],
        extra_compile_args=[*CPU_FLAGS, "-fopenmp"],
        extra_link_args=["-fopenmp"],
        **shared,
    )
    if not wants_cuda():
        return [cpu]
    cuda = Extension(
        "autoshard._native_cuda",
        ["csrc/bindings_cuda.cpp", "csrc/add_layer_norm.cu"],
        extra_compile_args=CPU_FLAGS,
        define_macros=[("AUTOSHARD_ARCHITECTURES", f'"{ARCHITECTURE_NAMES}"')],
        libraries=["cudart_static", "dl", "rt", "pthread"],
        **shared,
    )
    return [cpu, cuda]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative})
