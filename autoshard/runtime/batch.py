"""Cut the local batch into micro-batches, sign it, and compare it between ranks."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence

import torch

from autoshard.diagnostics import BatchError
from autoshard.ir.program import BatchLeaf
from autoshard.source import Span

Leaves = Mapping[str, torch.Tensor]
Signature = tuple[tuple[str, tuple[int, ...], str], ...]  # (name, shape, dtype) of each leaf


def check_rows(
    leaves: Leaves, micro_batch_size: int, num_microbatches: int, span: Span | None = None
) -> None:
    """Refuse a local batch that has another number of samples than the plan says."""
    want = micro_batch_size * num_microbatches
    for name, value in leaves.items():
        if value.dim() == 0 or value.shape[0] in (1, want):
            continue
        raise BatchError(
            f"batch leaf '{name}' has {value.shape[0]} samples, the plan needs {want}:"
            f" micro_batch_size {micro_batch_size} x num_microbatches {num_microbatches}",
            span=span,
            help=(
                f"give each data parallel rank {want} samples (dimension 0) per call",
                "or change `batch` in the plan; leaves of size 1 go to every micro-batch",
            ),
        )
    if want > 1 and all(value.dim() == 0 or value.shape[0] == 1 for value in leaves.values()):
        raise BatchError(
            f"no leaf of the batch has {want} samples: all have size 1",
            span=span,
            help=f"give each data parallel rank {want} samples (dimension 0) per call",
        )


def split_leaves(
    leaves: Leaves, specs: Sequence[BatchLeaf], count: int
) -> list[dict[str, torch.Tensor]]:
    """Return the leaves of each micro-batch: split on dim 0 where the program says so, as views."""
    missing = [spec.name for spec in specs if spec.name not in leaves]
    if missing:
        raise BatchError(
            f"the batch lacks {', '.join(map(repr, missing))}; it has {', '.join(leaves)}"
        )
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for spec in specs:
        pieces = _pieces(leaves[spec.name], spec, count)
        for part, piece in zip(parts, pieces, strict=True):
            part[spec.name] = piece
    return parts


def _pieces(value: torch.Tensor, spec: BatchLeaf, count: int) -> Sequence[torch.Tensor]:
    whole = spec.shape
    # With micro-batches of one sample a shared leaf looks like a sample.
    is_split = spec.is_split and not (spec.shape[0] == 1 and value.shape[0] == 1)
    if is_split:
        whole = (spec.shape[0] * count, *spec.shape[1:])
    if tuple(value.shape) != whole or value.dtype != spec.dtype:
        raise BatchError(
            f"batch leaf '{spec.name}' is {value.dtype} {list(value.shape)}, the program takes"
            f" {spec.dtype} {list(whole)}"
        )
    return value.split(spec.shape[0]) if is_split else [value] * count


def batch_signature(leaves: Leaves, count: int = 1) -> Signature:
    """Return what a program is compiled for: names, shapes and dtypes of one micro-batch's leaves.

    ``count`` is the number of micro-batches that the leaves hold; leaves of size 1 are shared.
    """
    return tuple(
        (name, _cut_shape(value.shape, count), str(value.dtype))
        for name, value in sorted(leaves.items())
    )


def _cut_shape(shape: Sequence[int], count: int) -> tuple[int, ...]:
    is_cut = len(shape) > 0 and shape[0] > 1
    return (shape[0] // count, *shape[1:]) if is_cut else tuple(shape)


def hash_values(leaves: Leaves) -> int:
    """Return 63 bits that tell two batches (or models) apart, by names, shapes and all bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(leaves.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype};".encode())
        held = value.detach().cpu().contiguous()  # a copy must outlive the reading of its bytes
        digest.update(_bytes_of(held))
    return int.from_bytes(digest.digest(), "big") >> 1


def hash_text(text: str) -> int:
    """Return 63 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _bytes_of(value: torch.Tensor) -> ctypes.Array:
    nbytes = value.numel() * value.element_size()
    if nbytes == 0:
        return (ctypes.c_char * 0)()
    return (ctypes.c_char * nbytes).from_address(value.data_ptr())
