"""Measure compiling: CPU seconds and memory, from a model and a plan to one program per stage.

    python benchmarks/compile.py [--quick] [--json]

Each row is a process of its own. `import` is what Python spends before the first line of ours that
matters (torch and transformers), `capture` is linear in the number of layers, `rest` is all that
follows: the passes and the checks after each, and `hit` what follows instead where the program is
found in the cache (what was proved of it is then not proved again). Seconds are of the CPU, so that
a busy machine changes them little. Models are on the meta device, nothing is run.

    bloom-176b   70 layers, 384 ranks (pp 12 x dp 8 x tp 4), the plan as it was trained
    gpt2         GPT-2 of 124 million parameters on 4 ranks (pp 2 x tp 2)
    layers N     a narrow BLOOM of N layers on 4 ranks (pp 4): what grows with depth
    stages N     the same, 4 layers to a stage: what grows with the number of equal stages

A last line tells where `parallelize` of a model of two layers spends its start: in torch's imports
(with those that torch.export makes when it first runs), in ours (with the parser's), beside both.

`--quick` takes 22 layers of BLOOM-176B and leaves out the deepest models.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FULL = ("bloom-176b 70", "gpt2 12", "layers 12", "layers 48", "stages 12", "stages 48")
QUICK = ("bloom-176b 22", "gpt2 12", "layers 4", "layers 16")

PLAN = """
autoshard 1
mesh {{ pp = {pp}, dp = 1, tp = {tp} }}
batch {{ micro_batch_size = 2, num_microbatches = 4 }}
{tensor}
pipeline {{ split = even(transformer.h.*), schedule = 1f1b }}
zero {{ stage = 1 }}
"""
GPT2_RULES = """tensor {
  transformer.wte: vocab(pad=128)
  transformer.h.* {
    attn.c_attn: colwise(parts=3), attn.c_proj: rowwise, mlp.c_fc: colwise, mlp.c_proj: rowwise
  }
  lm_head: vocab(pad=128)
}"""

START = """
import torch, autoshard
from torch import nn
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
plan = "autoshard 1\\nbatch { micro_batch_size = 2 }\\n"
loss = lambda out, batch: out.square().mean()
autoshard.parallelize(model, plan, example=(torch.randn(2, 16),), loss=loss, cache=False)
"""
OURS = ("autoshard", "lark")  # packages; torch imports nothing of the latter


def plan_of(kind: str, layers: int) -> str:
    """Return the text of a row's plan."""
    if kind == "bloom-176b":
        return (ROOT / "examples" / "bloom" / "bloom-176b.plan").read_text()
    if kind == "gpt2":
        return PLAN.format(pp=2, tp=2, tensor=GPT2_RULES)
    return PLAN.format(pp=4 if kind == "layers" else layers // 4, tp=1, tensor="")


def model_of(kind: str, layers: int) -> tuple[object, dict[str, object]]:
    """Return a row's model and micro-batch, on the meta device."""
    import torch
    from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

    narrow = {"vocab_size": 256, "hidden_size": 64, "n_head": 4}
    sizes = {"vocab_size": 250880, "hidden_size": 14336, "n_head": 112}
    length = {"bloom-176b": 2048, "gpt2": 1024}.get(kind, 32)
    with torch.device("meta"):
        if kind == "gpt2":
            model = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))
        else:
            sizes = sizes if kind == "bloom-176b" else narrow
            model = BloomForCausalLM(BloomConfig(n_layer=layers, use_cache=False, **sizes))
        tokens = torch.zeros(2, length, dtype=torch.int64)
    return model.train(), {"input_ids": tokens, "labels": tokens}


def run_one(kind: str, layers: int) -> None:
    """Compile in this process and print its figures as one line of JSON."""
    from autoshard.dsl.load import load
    from autoshard.dsl.resolve import resolve
    from autoshard.frontend import compile_plan
    from autoshard.ir.capture import capture
    from autoshard.ir.facts import describe
    from autoshard.source import Source

    model, batch = model_of(kind, layers)
    began = time.process_time()
    plan = load(Source("plan", plan_of(kind, layers))).require()
    mesh = resolve(plan, describe(model)).mesh
    captured = capture(model, batch, mesh=mesh, compare=False)
    had = time.process_time()
    program = compile_plan(model, plan, batch, captured=captured).program
    total = time.process_time()
    seconds = {"import": began, "capture": had - began, "rest": total - had, "total": total}
    nodes = sum(len(function.graph.nodes) for _, function in program.functions())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    seconds["hit"] = hit_seconds(model, plan, batch, captured, program)
    print(json.dumps({**seconds, "peak_mib": peak, "nodes": nodes}))


def hit_seconds(
    model: object, plan: object, batch: object, captured: object, program: object
) -> float:
    """Return the CPU seconds after capture of a run that finds its program in the cache."""
    from autoshard.cache.key import model_parts, program_key
    from autoshard.cache.store import Store
    from autoshard.ir.save import captured_bytes
    from autoshard.runtime.control import Control
    from autoshard.runtime.obtain import Made, obtain

    def compile_again() -> Made:
        raise SystemExit("the program was not found in the cache")

    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        for compiled in (lambda: Made(program), compile_again):
            began = time.process_time()
            parts, graph = model_parts(model, None), captured_bytes(captured)
            key = program_key("model", parts, graph, plan, batch, None, True)
            obtain(Control(), store, key, compiled)
    return time.process_time() - began


def measure(row: str) -> dict[str, object]:
    """Run one row in a process of its own."""
    words = [sys.executable, str(Path(__file__).resolve()), "--run", row]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {"row": row, **json.loads(done.stdout.splitlines()[-1])}


def start_up() -> str:
    """Return where a process of a small model's first call spends its seconds (wall time)."""
    began = time.perf_counter()
    words = [sys.executable, "-X", "importtime", "-c", START]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    total = time.perf_counter() - began
    lines = [line.partition(":")[2].split("|") for line in done.stderr.splitlines()]
    times = [(int(own), name.strip()) for own, _, name in lines if own.strip().isdigit()]
    ours = sum(time for time, name in times if name.split(".")[0] in OURS) / 1e6
    theirs = sum(time for time, _ in times) / 1e6 - ours
    return (
        f"start-up of a small model: {total:.2f} s, of it imports of torch's {theirs:.2f},"
        f" of ours {ours:.2f} (x {ours / theirs:.2f}), all else {total - ours - theirs:.2f}"
    )


def table(rows: list[dict[str, object]]) -> str:
    """Return the rows as text, then how what follows capture grows."""
    lines = ["CPU seconds       import capture    rest   total     hit  peak MiB   nodes"]
    for r in rows:
        seconds = " ".join(f"{r[k]:7.2f}" for k in ("import", "capture", "rest", "total", "hit"))
        lines.append(f"{r['row']:<16} {seconds} {r['peak_mib']:9} {r['nodes']:7}")
    by_kind: dict[str, list[dict]] = {}
    for r in rows:
        by_kind.setdefault(r["row"].split()[0], []).append(r)
    for kind, found in by_kind.items():
        if len(found) == 2:
            few, many = found
            depths = " -> ".join(r["row"].split()[1] for r in found)
            lines.append(f"{kind} {depths}: rest x {many['rest'] / few['rest']:.2f}")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", metavar="ROW", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        kind, layers = args.run.split()
        run_one(kind, int(layers))
        return 0
    rows = [measure(row) for row in (QUICK if args.quick else FULL)]
    started = start_up()
    found = {"rows": rows, "start": started}
    print(json.dumps(found) if args.json else f"{table(rows)}\n{started}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
