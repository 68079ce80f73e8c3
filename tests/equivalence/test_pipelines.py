"""Every schedule trains as one process does, whatever the ranks, micro-batches, ZeRO and ties.

The whole cross is `python -m autoshard.testing.pipelines`; this is its covering subset.
"""

import gc
import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from autoshard.cost.choices import gather_choices
from autoshard.diagnostics import RuntimeMismatchError, VerifyError
from autoshard.ir.invariants import CHECKERS
from autoshard.proof.order import prove_program
from autoshard.runtime.batch import split_leaves
from autoshard.runtime.executor import Executable
from autoshard.schedule import SCHEDULES, Kind
from autoshard.schedule.posting import posted
from autoshard.testing import pipelines
from autoshard.testing.lockstep import run_ranks
from autoshard.testing.pipelines import Cell, Result, cover, run_cell, schedule_cell, unequal

CELLS = tuple(cover())
run = cache(run_cell)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_schedule_trains_as_one_process_does(cell: Cell) -> None:
    assert run(cell).wrong == ""


def test_the_subset_has_every_value_of_the_cross() -> None:
    assert {c.schedule for c in CELLS} == set(SCHEDULES)
    assert {c.pp for c in CELLS} == {2, 3, 4} and {c.zero for c in CELLS} == {0, 1, 2, 3}
    assert {c.microbatches for c in CELLS} == set(range(1, 9))
    ties = {(c.virtual_stages, c.tied) for c in CELLS}
    assert ties == {(1, True), (1, False), (2, True), (2, False)}


def alike(cell: Cell) -> list[Result]:
    """Return the runs of all schedules over the cell's stages."""
    cells = (replace(cell, schedule=name) for name in SCHEDULES)
    return [run(c) for c in cells if c.placement == cell.placement]


def test_schedules_that_add_in_one_order_are_bit_equal() -> None:
    results = alike(Cell("1f1b", 2, 3, 0, tied=False))
    assert len(results) == 5 and unequal(results) == []


def test_gradients_that_are_not_bit_equal_would_be_seen() -> None:
    first, second, *_ = alike(Cell("1f1b", 2, 3, 0, tied=False))
    grads = {n: g + (n == "wpe.weight") * 1e-15 for n, g in second.records[0].grads.items()}
    record = replace(second.records[0], grads=grads)
    assert "differ in wpe.weight" in unequal([first, replace(second, records=(record,))])[0]


V_CELL = Cell("interleaved_1f1b", 2, 2, 1, tied=True)


def tied_too_early(program) -> None:
    """Move each rank's reduction of tied gradients behind the stage's own last gradient."""
    rows = []
    for row in program.schedule.ranks:
        (reduction,) = [a for a in row if a.kind is Kind.REDUCE_GRAD][-1:]
        rest = [a for a in row if a is not reduction]
        last = max(i for i, a in enumerate(rest) if a.stage == reduction.stage and a.kind is Kind.B)
        rows.append((*rest[: last + 1], reduction, *rest[last + 1 :]))
    program.schedule = replace(program.schedule, ranks=tuple(rows))


def test_a_tied_sum_before_a_rank_s_other_stages_is_a_deadlock_that_the_proof_shows() -> None:
    program, _ = schedule_cell(V_CELL)
    assert prove_program(program).ok
    tied_too_early(program)
    verdict = prove_program(program)
    assert not verdict.ok and "REDUCE_GRAD" in verdict.message
    with pytest.raises(VerifyError, match="sums tied gradients before"):
        CHECKERS["schedulable"](program)


def test_lock_step_finds_the_same_deadlock(monkeypatch) -> None:
    program, code = schedule_cell(V_CELL)
    tied_too_early(program)
    monkeypatch.setattr(pipelines, "schedule_cell", lambda cell: (program, code))
    with pytest.raises(RuntimeMismatchError, match="deadlock"):
        run_cell(V_CELL)


def tensors_after(steps: int) -> int:
    """Return how many tensors are alive once all ranks have trained some steps."""
    cell = Cell("zb_h2", 2, 3, 0, tied=False)
    program, code = schedule_cell(cell)
    (leaves,) = pipelines.local_batches(cell)

    def train(exe: Executable) -> None:
        parts = split_leaves(leaves, program.leaves, program.num_microbatches)
        for index in range(steps):
            exe.step(parts, index=index)

    executables, _ = run_ranks(program, pipelines.values_of(cell, program), train, code)
    done = tuple(d.actions for d in executables[0].trace)
    assert done == posted(program.schedule.ranks[0])
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def test_nothing_is_left_of_a_step_but_gradients() -> None:
    tensors_after(1)
    assert tensors_after(2) == tensors_after(5)


def test_gathering_once_a_step_or_in_every_phase_is_told_with_its_cost() -> None:
    program, _ = schedule_cell(Cell("1f1b", 4, 5, 3, tied=True))
    kept, again = gather_choices(program)[:2]
    assert (kept.stage, kept.is_chosen, again.is_chosen) == (0, False, True)
    assert kept.parameter_bytes > again.parameter_bytes
    assert kept.gradient_bytes == 2 * again.gradient_bytes
    assert again.gathered_bytes >= 5 * kept.gathered_bytes
    assert again.reduced_bytes == 5 * kept.reduced_bytes


def test_parts_hold_every_cell_once_and_keep_together_what_is_compared() -> None:
    cells = list(pipelines.cross())
    for of in (1, 3, 8):
        parts = [pipelines.part(cells, number, of) for number in range(1, of + 1)]
        assert sorted(str(c) for part in parts for c in part) == sorted(map(str, cells))
        kinds = [{(c.zero, c.tied) for c in part} for part in parts]
        assert sum(map(len, kinds)) == 8


def test_what_is_wrong_in_one_part_is_wrong_in_the_whole(tmp_path, capsys) -> None:
    good = {"cells": ["a"], "wrong": [], "not_bit_equal": [], "seconds": 1.0}
    good["worst"] = {"cell": "a", "what": "loss", "error": 1e-16}
    bad = good | {"cells": ["a", "b"], "wrong": ["b: loss: 1.0e+00"]}
    bad["worst"] = {"cell": "b", "what": "loss", "error": 1.0}
    for name, found in (("good", good), ("bad", bad)):
        (tmp_path / name).write_text(json.dumps(found))
    assert pipelines.main(["--join", str(tmp_path / "good")]) == 0
    assert pipelines.main(["--join", str(tmp_path / "good"), str(tmp_path / "bad")]) == 1
    out = capsys.readouterr().out
    assert "2 cells in 2 s: 1 wrong" in out and "b: loss: 1.0e+00" in out
