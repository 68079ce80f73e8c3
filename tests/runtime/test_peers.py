"""A rank that dies while others wait is named, with how it ended."""

import os
import signal
import subprocess
import sys
from multiprocessing import get_context

import pytest
import torch.distributed as dist

from autoshard.diagnostics import CommunicationError
from autoshard.runtime.control import Control
from autoshard.runtime.peers import ended, here

ENDINGS = {
    "was killed by SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "has ended with exit code 7": "raise SystemExit(7)",
    "has ended": "",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_how_a_process_ended_is_told(how):
    _, *where = here().split(" ")
    process = subprocess.Popen([sys.executable, "-S", "-c", ENDINGS[how]])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays to be looked at
    places = [here(), " ".join([str(process.pid), *where])]
    assert ended(places) == f"rank 1 (process {process.pid}) {how}"
    process.wait()
    assert ended(places) == f"rank 1 (process {process.pid}) has ended"


def test_who_runs_or_is_elsewhere_has_not_ended():
    _, _, space = here().split(" ")
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert ended([here(), f"{process.pid} another-machine {space}"]) == ""


def _rank(rank, folder, dies):
    """Run one of two ranks; the one that ``dies`` does while rank 0 should compile."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
    control = Control(rank, 2, dist.group.WORLD)
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        control.from_first(lambda: b"program")
        control.from_first(lambda: b"another")
    except CommunicationError as error:
        (folder / "said").write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize(("dies", "what"), [(0, "waiting for rank 0"), (1, "")])
def test_a_rank_that_dies_while_rank_0_compiles_is_named_on_the_other(tmp_path, dies, what):
    fork = get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, tmp_path, dies)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    ranks[1 - dies].join(30)
    said = (tmp_path / "said").read_text()
    ranks[dies].join()
    assert f"rank {dies} (process {ranks[dies].pid}) was killed by SIGKILL" in said
    assert what in said and "memory runs out" in said
