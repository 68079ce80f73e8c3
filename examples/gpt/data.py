"""Real text without a download: the language reference that every CPython carries.

`pydoc_data.topics` holds about 0.5 MB of English technical prose. Tokens are its bytes, so the
vocabulary has 256 entries. A batch depends on the step alone: how many ranks share it never changes
which samples it holds.
"""

import hashlib
import platform
import sys
from collections.abc import Iterator
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor

# The prose changes with every CPython release; curves are comparable under equal sums only.
SHA256 = {
    "3.10.13": "b1882a33e8512d28c4e983e7376fdeac986c374348734197b7ac5dfcb93d6542",
    "3.11.2": "b0796031be1d1b35e6efa46b7944effd47a0c52a48087d470dde314fe2d66968",
    "3.11.7": "2a95af4ac93f5b719944030ce3769070ddf827d847cba42192afa8da989e5dc4",
    "3.12.1": "b5bb57d637a700f50d8c7309e7340f40a333fdf2cba89d3f1da81c1b74ee8952",
    "3.13.0": "4b7ff11aae42ee979a50edb5d279a88ae9d80d7216e9ba99add988136ded5fb2",
}


@cache
def text() -> Tensor:
    """Return the bytes of all topics, in the topics' alphabetical order, as one vector."""
    raw = "\n".join(topics[name] for name in sorted(topics)).encode()
    _check(hashlib.sha256(raw).hexdigest())
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def batches(
    steps: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    global_batch_size: int = 16,
    context: int = 64,
    seed: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Yield each step's share of data-parallel rank `dp_rank`: tokens and the targets after them.

    Joining the shares of all ranks gives the same global batch for every `dp_size`.
    """
    local, rest = divmod(global_batch_size, dp_size)
    if rest:
        raise ValueError(f"a global batch of {global_batch_size} can't be split over {dp_size}")
    for step in range(steps):
        chooser = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(text()) - context, (global_batch_size,), generator=chooser)
        mine = starts[dp_rank * local : (dp_rank + 1) * local]
        windows = text()[mine[:, None] + torch.arange(context + 1)].long()
        yield {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def _check(digest: str) -> None:
    version = platform.python_version()
    pinned = SHA256.get(version)
    if pinned is None:
        print(f"text of CPython {version} has no pinned checksum: {digest[:16]}", file=sys.stderr)
    elif pinned != digest:
        raise ValueError(f"pydoc_data.topics of CPython {version} is not the released text")
