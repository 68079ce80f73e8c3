"""Write docs/performance.md from what the driver printed with --json.

    python benchmarks/page.py RESULT.json ... > docs/performance.md

The text between the tables is `benchmarks/page.md`; figures in tables come from the results alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.table import text

TEMPLATE = Path(__file__).with_name("page.md")


def main() -> int:
    """Print the page."""
    results = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    launches = [(result, launch) for result in results for launch in result["launches"]]
    page = TEMPLATE.read_text()
    page = page.replace("@table@", text([r for _, x in launches for r in x["rows"]], "pipe"))
    page = page.replace("@launches@", "\n".join(_line(*pair) for pair in launches))
    print(page.replace("@size@", _size(results[0])), end="")
    return 0


def _size(result: dict) -> str:
    size = result["size"]
    shape = ", ".join(f"{name} {size[name]}" for name in ("layers", "width", "vocab", "length"))
    return (
        f"{result['date']}, torch {result['torch']}, {result['machine']}, {result['cores']} CPU"
        f" cores, gloo, one thread a rank. Size `{result['size_name']}`: {shape}, global batch"
        f" {size['batch']}, float32, fused AdamW, {size['microbatches']} micro-batches in"
        f" pipelines; {size['rounds']} rounds of {size['inner']} steps"
    )


def _line(result: dict, launch: dict) -> str:
    ranks = launch["rows"][0]["ranks"]
    losses = " ".join(f"{loss:.5f}" for loss in launch["expected_losses"])
    return (
        f"- `python benchmarks/bench.py --only {launch['launch']}`: {ranks} ranks, load"
        f" {launch['load'][0]:.1f} before and {launch['load'][1]:.1f} after,"
        f" {launch['cores_used']:.2f} cores used; losses of one process {losses}, and everyone's"
        " within 1e-4 of them"
    )


if __name__ == "__main__":
    sys.exit(main())
