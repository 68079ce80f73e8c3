"""Train by every schedule on four gloo processes that are held up at random; print what each did.

The processes are copies of this one, so everything is compiled once, for all of them.
"""

import json

import torch

from autoshard.runtime.batch import split_leaves
from autoshard.runtime.comm import ProcessGroups
from autoshard.runtime.link import link
from autoshard.schedule import SCHEDULES
from autoshard.schedule.posting import posted
from autoshard.schedule.simulate import simulate
from autoshard.testing.delays import Delayed
from autoshard.testing.pipelines import Cell, local_batches, schedule_cell, values_of
from autoshard.testing.processes import run_processes

WORLD, LONGEST_S, SHARE = 4, 0.2, 0.25


def cells():
    """Return every schedule over four stages: on four ranks, or two stages each on two by two."""
    for number, name in enumerate(SCHEDULES):
        is_split = SCHEDULES[name].virtual_stages[0] > 1
        yield Cell(name, 2 if is_split else 4, 3 + number % 3, zero=2 * is_split, tied=is_split)


def train(rank):
    """Return, by schedule, the loss, the gradients' sum and the actions in order."""
    found = {}
    for cell in cells():
        program, code = schedule_cell(cell)
        subsets = {"pp": [(0, 1)]} if cell.tied else {}
        groups = ProcessGroups(program.mesh, rank, torch.device("cpu"), subsets=subsets)
        comm = Delayed(groups, seed=rank, longest_s=LONGEST_S, share=SHARE)
        exe = link(program, comm, code=code)
        for name, value in values_of(cell, program).items():
            exe.storage.write(name, value)
        leaves = local_batches(cell)[comm.index("dp")]
        parts = split_leaves(leaves, program.leaves, program.num_microbatches)
        losses = [exe.step(parts, index=0).item() for _ in range(2)]
        found[str(cell)] = {
            "losses": losses,
            "actions": [str(action) for done in exe.trace for action in done.actions],
            "slept": comm.slept_s,
        }
    return found


def rows(cell):
    """Return what each rank of the world should do, as text."""
    program, _ = schedule_cell(cell)
    ranks = [program.schedule.ranks[program.mesh.index(rank, "pp")] for rank in range(WORLD)]
    return [[str(action) for step in posted(row) for action in step] for row in ranks]


def simulated(cell):
    """Return what each rank of the world computes in the simulator's grid, from left to right."""
    program, _ = schedule_cell(cell)
    grid = [sorted(row, key=lambda t: t.start) for row in simulate(program.schedule).ranks]
    homes = [program.mesh.index(rank, "pp") for rank in range(WORLD)]
    return [[str(timed.action) for timed in grid[home]] for home in homes]


if __name__ == "__main__":
    grids = {str(cell): simulated(cell) for cell in cells()}
    planned = {str(cell): rows(cell) for cell in cells()}
    ran = run_processes(WORLD, train, timeout_s=120)
    print(json.dumps({"planned": planned, "grids": grids, "ranks": ran}))
