"""Real gloo processes."""

from pathlib import Path

import pytest

from tests.distributed.launch import torchrun

HERE = Path(__file__).parent

pytestmark = pytest.mark.distributed


def test_four_ranks_compute_bit_for_bit_what_lock_step_does(tmp_path):
    job = torchrun(tmp_path, 4, HERE / "toy_worker.py")
    assert job.returncode == 0, job.output[-3000:]
    assert sorted(job.ranks) == [0, 1, 2, 3]
