"""The ZeRO paper's Table 1, and our own storage by the same formula."""

from __future__ import annotations

import pytest

from autoshard.cli import main
from autoshard.cost.zero_table import PAPER, RANKS, gigabytes, stored_state, zero_table
from autoshard.plan import PrecisionBlock

# Rajbhandari et al. 2020, Table 1: GB on one rank with stages 1, 2 and 3, as printed there.
TABLE = {
    "7.5B": """
        120  120  120
        52.5 41.3 30
        35.6 21.6 7.5
        31.4 16.6 1.88
        30.4 15.4 0.47
        30.1 15.1 0.12
    """,
    "128B": """
        2048 2048 2048
        896  704  512
        608  368  128
        536  284  32
        518  263  8
        513  257  2
    """,
    "1T": """
        16000 16000 16000
        7000  5500  4000
        4750  2875  1000
        4187  2218  250
        4046  2054  62.5
        4011  2013  15.6
    """,
}


def last_digit(text: str) -> float:
    """Return what one unit of the last digit is worth: the paper rounds some and cuts others."""
    return 10.0 ** -len(text.partition(".")[2])


@pytest.mark.parametrize("size", TABLE)
def test_the_formula_gives_the_papers_table(size: str) -> None:
    rows = [line.split() for line in TABLE[size].split("\n") if line.strip()]
    for ranks, row in zip(RANKS, rows, strict=True):
        for stage, text in enumerate(row, 1):
            ours = gigabytes(size, PAPER, stage, ranks)
            assert abs(float(ours) - float(text)) < last_digit(text), (size, ranks, stage)


def test_float32_gradients_make_eighteen_bytes() -> None:
    assert [stored_state(PrecisionBlock("bf16"), s).total for s in (1, 2)] == [18, 18]
    assert "2 + 4 + 12 = 18 bytes a parameter" in zero_table(["1B"], PrecisionBlock("bf16"))
    assert "4 + 4 + 8 = 16 bytes a parameter\n" in zero_table(["1B"], PrecisionBlock())


def test_inspect_prints_it_without_a_model(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "--zero-table", "7.5B,128B,1T"]) == 0
    ranks_64 = next(line for line in capsys.readouterr().out.split("\n") if "  64  " in line)
    assert ranks_64.split() == [
        "64",
        "31.4",
        "16.6",
        "1.88",
        "536",
        "284",
        "32",
        "4188",
        "2219",
        "250",
    ]


@pytest.mark.parametrize(
    ("words", "said"), [(["--zero-table", "7.5GB"], "no number of parameters"), ([], "give PLAN")]
)
def test_inspect_refuses_what_it_cannot_count(
    words: list[str], said: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["inspect", *words]) == 2
    assert said in capsys.readouterr().err
