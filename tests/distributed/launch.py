"""Start a worker script as several processes and collect what each rank says."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Launched:
    """What a job left behind."""

    returncode: int
    output: str
    ranks: dict[int, dict]

    def require_success(self):
        """Fail with what the ranks printed; the launcher's own words come last."""
        assert self.returncode == 0, self.output[:6000]


def torchrun(tmp_path, world, script, *args, timeout=150):
    """Run ``script`` under torchrun and return its result; a hang fails the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), str(script), *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "OUT": str(tmp_path)}
    # A group of its own: on a hang the whole job is ended, not only the launcher.
    job = subprocess.Popen(
        command,
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, 9)
        output, _ = job.communicate()
        raise AssertionError(f"the job hung for {timeout} s:\n{output[-4000:]}") from None
    ranks = {int(p.stem): json.loads(p.read_text()) for p in Path(tmp_path).glob("*.json")}
    return Launched(job.returncode, output, ranks)


def say(**facts):
    """Leave facts of this rank for the test to read."""
    path = Path(os.environ["OUT"]) / f"{os.environ['RANK']}.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **facts}))
