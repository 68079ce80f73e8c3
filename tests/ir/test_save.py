"""A program as bytes: what comes back is the same program, and other bytes are refused."""

import json
import zlib

import pytest
import torch

from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.node_info import info
from autoshard.ir.printer import print_program
from autoshard.ir.save import from_bytes, to_bytes
from autoshard.ir.save_values import SaveError
from autoshard.runtime.fingerprint import program_text
from autoshard.source import Source
from autoshard.testing.models import tiny_gpt, tiny_hf
from autoshard.testing.plans import Layout, plan_text

LAYOUT = Layout(dp=2, tp=2, zero=3, sequence=True)


@pytest.fixture(scope="module")
def program():
    """A program with a prelude, collectives, flat buckets, dropout and a constant."""
    model, batch, loss = tiny_hf("bloom", layers=2, batch=LAYOUT.samples, length=8)
    share = {name: value.chunk(LAYOUT.dp)[0] for name, value in batch.items()}
    plan = load(Source("x.plan", plan_text("bloom", LAYOUT))).require()
    made = compile_plan(model, plan, share, loss, compare=True).program
    made.constants["odd"] = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()
    made.constants["none"] = torch.empty(0, 2, dtype=torch.bool)
    return made


@pytest.fixture(scope="module")
def back(program):
    return from_bytes(to_bytes(program))


def test_a_saved_program_comes_back_the_same(program, back):
    assert program_text(back) == program_text(program)
    assert print_program(back) == print_program(program)
    assert to_bytes(back) == to_bytes(program)
    for name in ("mesh", "leaves", "buckets", "schedule", "compared", "journal", "holds", "level"):
        assert getattr(back, name) == getattr(program, name), name


def test_values_and_origins_of_nodes_come_back(program, back):
    for (name, old), (_, new) in zip(program.functions(), back.functions(), strict=True):
        for before, after in zip(old.graph.nodes, new.graph.nodes, strict=True):
            assert info(after) == info(before), f"{name}: {before}"
            _same_fakes(before.meta.get("val"), after.meta.get("val"))


def _same_fakes(old, new):
    assert type(new) is type(old)
    if isinstance(old, torch.Tensor):
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        assert new.storage_offset() == old.storage_offset()
    elif isinstance(old, list | tuple):
        for a, b in zip(old, new, strict=True):
            _same_fakes(a, b)


def test_constants_come_back_bit_by_bit_and_with_their_strides(program, back):
    for name, value in program.constants.items():
        assert torch.equal(back.constants[name], value), name
        assert back.constants[name].stride() == value.stride(), name


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_truncated_program_is_refused(program, cut):
    with pytest.raises(SaveError):
        from_bytes(to_bytes(program)[:cut])


def test_a_name_that_is_no_operator_is_refused(program):
    """Nothing that is read may be called but torch's operators."""
    raw = to_bytes(program)
    end = 8 + int.from_bytes(raw[:8], "big")
    said = json.loads(zlib.decompress(raw[8:end]))
    rows = next(graph[3] for graph in said["graphs"] if graph[0] == "stage0.F")
    call = next(row for row in rows if row[0] == 1)
    for wrong in ("os.system", "aten.add", "aten.__class__.Tensor", "autoshard.nothing.default"):
        call[4] = wrong
        text = zlib.compress(json.dumps(said).encode())
        with pytest.raises(SaveError, match="there is no operator"):
            from_bytes(len(text).to_bytes(8, "big") + text + raw[end:])


def test_a_program_that_is_not_lowered_is_refused():
    model, batch, loss = tiny_gpt(layers=1, batch=2, length=4)
    plan = load(Source("x", "autoshard 1\nbatch { micro_batch_size = 2 }\n")).require()
    early = compile_plan(model, plan, batch, loss, until="tensor").program
    with pytest.raises(SaveError, match="has not come down to its phases"):
        to_bytes(early)
