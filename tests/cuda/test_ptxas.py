"""The CUDA kernels as the device's compiler sees them: no spills, 16-byte loads and stores."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
ARCHITECTURE = "sm_90"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return ptxas' words and the PTX of the kernels."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    folder = tmp_path_factory.mktemp("ptxas")
    what = ["-std=c++17", "-O3", "-cubin", f"-arch={ARCHITECTURE}", "-Xptxas", "-v"]
    where = ["--keep", f"--keep-dir={folder}", "-o", str(folder / "kernels.cubin")]
    command = ["nvcc", *what, *where, str(SOURCES / "add_layer_norm.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr, next(folder.glob("*.ptx")).read_text()


def test_no_kernel_spills_registers(compiled: tuple[str, str]) -> None:
    words, _ = compiled
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", words)
    assert len(spills) > 30
    assert set(spills) == {("0", "0")}


def test_wide_kernels_move_16_bytes_at_a_time(compiled: tuple[str, str]) -> None:
    _, ptx = compiled
    kernels = re.split(r"\n\.visible \.entry |\n\.entry |\.entry ", ptx)[1:]
    wide = [text for text in kernels if re.match(r"\S*(forward|backward)_kernel\S*Li[48]E", text)]
    assert wide
    for text in wide:
        assert re.search(r"ld\.global(\.nc)?\.v4\.\w32", text)
        assert re.search(r"st\.global\.v4\.\w32", text)
