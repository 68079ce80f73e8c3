"""Make the project's virtual environment: `python3 .ci/environment.py .venv`.

Standard library only, because it runs before anything is installed. A torch of the supported range
that the calling Python can import is borrowed instead of installed a second time; else torch comes
from the index that TORCH_INDEX names, or from pip's own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BORROWED = "borrowed_torch.pth"
PROBE = "import torch, pathlib; print(torch.__version__, pathlib.Path(torch.__file__).parents[1])"


def supported_range() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lowest supported and the first unsupported torch that pyproject.toml declares."""
    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(r'"torch>=([\d.]+),<([\d.]+)"', text)
    if match is None:
        raise SystemExit("pyproject.toml declares no torch range")
    return _version(match[1]), _version(match[2])


def find_torch() -> tuple[str, str] | None:
    """Return version and folder of a supported torch of the calling Python, or None."""
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if probe.returncode != 0:
        return None
    version, folder = probe.stdout.strip().split(" ", 1)
    low, high = supported_range()
    return (version, folder) if low <= _version(version) < high else None


def borrow(python: Path, folder: str) -> None:
    """Let the new environment import what stands in `folder`, after its own packages."""
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
    (Path(site.stdout.strip()) / BORROWED).write_text(folder + "\n")


def write_constraints(target: Path, torch_version: str | None) -> None:
    """Copy constraints.txt; a borrowed torch replaces the pinned one."""
    text = (ROOT / "constraints.txt").read_text()
    if torch_version is not None:
        text = re.sub(r"(?m)^torch==.*$", f"torch=={torch_version}", text)
    target.write_text(text)


def main() -> None:
    """Create the environment named on the command line and install autoshard into it."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    venv = Path(sys.argv[1]).resolve()
    python = venv / "bin" / "python"
    found = find_torch()
    if not python.exists():
        _run(sys.executable, "-m", "venv", venv, hint="on Debian: apt-get install python3-venv")
    constraints = venv / "constraints.txt"
    write_constraints(constraints, found[0] if found else None)
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "-c", constraints)
    index = os.environ.get("TORCH_INDEX")
    if found:
        print(f"using torch {found[0]} of the active environment")
        borrow(python, found[1])
    elif index:
        _run(*pip, "--index-url", index, "torch", hint=f"TORCH_INDEX is {index}")
    _run(*pip, "-e", f"{ROOT}[dev,hf]", hint="see pip's message above")
    (venv / ".installed").touch()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:2])


def _run(*command: object, hint: str) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words).returncode != 0:
        raise SystemExit(f"failed: {' '.join(words)}\n{hint}")


if __name__ == "__main__":
    main()
