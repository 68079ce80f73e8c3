"""Every schedule on real processes that drift apart: equal losses, no hang, nothing left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.schedule.action import COMPUTE, Action
from autoshard.testing.pipelines import reference_of
from tests.distributed.pipeline_worker import WORLD, cells

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def job():
    """Return the group of the processes, what was planned, and what each rank did."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.pipeline_worker"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, 9)
        raise
    assert started.returncode == 0
    return started.pid, json.loads(output)


def test_delayed_ranks_have_the_losses_of_one_process(job) -> None:
    _, found = job
    for cell in cells():
        expected = reference_of(cell)[0].loss.item()
        for rank in found["ranks"]:
            assert rank[str(cell)]["losses"] == pytest.approx([expected] * 2, rel=1e-10), str(cell)
    assert all(sum(ran["slept"] for ran in rank.values()) > 0 for rank in found["ranks"])


def test_each_rank_did_what_its_schedule_says(job) -> None:
    _, found = job
    assert len(found["ranks"]) == WORLD
    for cell in cells():
        did = [rank[str(cell)]["actions"] for rank in found["ranks"]]
        assert did == found["planned"][str(cell)], str(cell)


def test_the_simulated_grid_is_the_order_that_was_executed(job) -> None:
    _, found = job
    for cell in cells():
        for rank, grid in zip(found["ranks"], found["grids"][str(cell)], strict=True):
            did = rank[str(cell)]["actions"]
            assert [a for a in did if Action.parse(a).kind in COMPUTE] == grid, str(cell)


def test_no_process_is_left(job) -> None:
    with pytest.raises(ProcessLookupError):
        os.killpg(job[0], 0)
