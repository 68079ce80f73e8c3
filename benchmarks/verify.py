"""Measure `autoshard verify`: BLOOM-176B without numbers, and a 384-rank structure with numbers.

    python benchmarks/verify.py [--quick] [--json]

Each row is a process of its own: wall-clock seconds of the whole command, from start to verdict,
and the most memory it held. The first row is the real plan and the real model on the meta device
(70 layers, 384 ranks), static checks only. The second one is the structure of a plan for pp 12 x
dp 4 x tp 8 on a model of the same depth with a width of 16: all 384 ranks run in lock step in one
process in float64, and loss, gradients, norm and updated parameters are compared with the plain
model. Reduced are the sizes (width, vocabulary, length, micro-batches), not the structure.

`--quick` takes 22 layers of BLOOM and 16 ranks (pp 4 x dp 2 x tp 2).
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BLOOM = ROOT / "examples" / "bloom"
FULL = (("static", 70, ""), ("numbers", 70, "12x4x8"))
QUICK = (("static", 22, ""), ("numbers", 10, "4x2x2"))

STRUCTURE = """
autoshard 1
mesh {{ pp = {pp}, dp = {dp}, tp = {tp} }}
batch {{ micro_batch_size = 1, num_microbatches = {microbatches} }}
tensor {{
  transformer.word_embeddings: vocab
  transformer.h.* {{
    self_attention.query_key_value: colwise, self_attention.dense: rowwise
    mlp.dense_h_to_4h: colwise, mlp.dense_4h_to_h: rowwise
  }}
  lm_head: vocab
}}
pipeline {{ split = even(transformer.word_embeddings, transformer.h.*, lm_head), schedule = 1f1b }}
zero {{ stage = 1 }}
"""


def verify_static(layers: int) -> dict[str, object]:
    """Verify BLOOM-176B, or its first layers, on the meta device without numbers."""
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    from autoshard.dsl.load import load
    from autoshard.source import Source
    from autoshard.verify import verify

    config = BloomConfig(
        vocab_size=250880, hidden_size=14336, n_layer=layers, n_head=112, use_cache=False
    )
    with torch.device("meta"):
        model = BloomForCausalLM(config).train()
        tokens = torch.zeros(2, 2048, dtype=torch.int64)
    plan = load(Source("bloom-176b.plan", (BLOOM / "bloom-176b.plan").read_text())).require()
    verdict = verify(model, plan, {"input_ids": tokens, "labels": tokens}, numbers=False)
    return verdict.to_json()


def verify_structure(layers: int, mesh: str) -> dict[str, object]:
    """Verify a narrow model of the same depth on all ranks of a mesh, with numbers."""
    from autoshard.dsl.load import load
    from autoshard.source import Source
    from autoshard.testing.models import tiny_hf
    from autoshard.verify import verify

    pp, dp, tp = map(int, mesh.split("x"))
    heads = max(tp, 4)
    text = STRUCTURE.format(pp=pp, dp=dp, tp=tp, microbatches=2)
    model, batch, loss = tiny_hf(
        "bloom", layers=layers, width=2 * heads, heads=heads, vocab=64, batch=2 * dp, length=4
    )
    plan = load(Source("structure.plan", text)).require()
    return verify(model, plan, batch, loss, steps=1).to_json()


def measure(kind: str, layers: int, mesh: str) -> dict[str, object]:
    """Run one verification in a process of its own; return its seconds, memory and rows."""
    words = [sys.executable, str(Path(__file__).resolve()), "--run", kind, str(layers), mesh]
    start = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"what": kind, "layers": layers, "mesh": mesh or "12x8x4", "seconds": seconds, **found}


def run_one(kind: str, layers: int, mesh: str) -> None:
    """Verify in this process and print the verdict and the most memory as one line of JSON."""
    verdict = verify_static(layers) if kind == "static" else verify_structure(layers, mesh)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_bytes": peak, "verdict": verdict}))


def table(rows: list[dict]) -> str:
    """Return the rows as text, each with its links below."""
    lines = [f"{platform.processor() or platform.machine()}, {platform.python_version()}"]
    for row in rows:
        lines.append(
            f"{row['what']}, {row['layers']} layers, pp x dp x tp {row['mesh']}: "
            f"{row['seconds']:.0f} s, {row['peak_bytes'] / 2**30:.2f} GiB"
        )
        for link in row["verdict"]["rows"]:
            shown = f"{link['link']:<16} {link['status']:<13} {link['seconds']:6.1f} s"
            lines.append(f"    {shown}  {link['summary']}")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; return 1 when a verdict is not good."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=("static", "numbers"))
    parser.add_argument("--run", nargs=3, metavar=("KIND", "LAYERS", "MESH"))
    args = parser.parse_args()
    if args.run:
        kind, layers, mesh = args.run
        run_one(kind, int(layers), mesh)
        return 0
    cases = [c for c in (QUICK if args.quick else FULL) if args.only in (None, c[0])]
    rows = [measure(*case) for case in cases]
    print(json.dumps({"rows": rows}) if args.json else table(rows))
    return 0 if all(row["verdict"]["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
