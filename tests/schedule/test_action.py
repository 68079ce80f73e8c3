"""The text form of actions."""

import pytest

from autoshard.diagnostics import ScheduleError
from autoshard.schedule import Action, Kind

EXAMPLES = [
    "0F0", "1B0", "1I0", "1W0", "0SEND_F0", "1RECV_F0", "1SEND_B0", "0RECV_B0",
    "2UNSHARD", "2RESHARD", "2REDUCE_GRAD", "12SEND_F345",
]  # fmt: skip


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_action_prints_as_it_was_written(text) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", EXAMPLES)
def test_torch_reads_our_text_and_prints_it_back(text) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    assert str(schedules._Action.from_str(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "0UNSHARD3", "0F0x", "-1F0", "0f0"])
def test_a_text_that_is_no_action_is_refused_by_name(text) -> None:
    with pytest.raises(ScheduleError, match=f"'{text}'"):
        Action.parse(text)


def test_a_send_meets_the_receive_of_its_neighbour_stage() -> None:
    assert Action.parse("0SEND_F3").partner == Action.parse("1RECV_F3")
    assert Action.parse("1SEND_B3").partner == Action.parse("0RECV_B3")
    assert Action.parse("0RECV_B3").partner == Action(Kind.SEND_B, 1, 3)
