"""Run kernel tests once for each instruction set that this machine has."""

from collections.abc import Iterator

import pytest

from autoshard.ops import native
from tests.ops.norms import instruction_sets


@pytest.fixture(params=instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Switch the CPU kernels to one instruction set; 'reference' where they were not built."""
    if request.param == "reference":
        yield request.param
        return
    assert native.CPU.module.use_instruction_set(request.param)
    yield request.param
    native.CPU.module.use_instruction_set(instruction_sets()[0])
