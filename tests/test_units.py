"""Sizes and bandwidths, read and shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.units import (
    Size,
    divisors,
    read_bandwidth,
    read_size,
    show_bandwidth,
    show_bytes,
    show_count,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("25MiB", Size(25 * 2**20)),
        ("500MB", Size(500 * 10**6)),
        ("0.5GB", Size(500 * 10**6)),
        ("500Melems", Size(500 * 10**6, "elements")),
        ("1e9B", Size(10**9)),
        ("0B", Size(0)),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, size: Size) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["5e8", "500", "500mb", "0.3B", "MB", "1.5.2GB", "", "-1MB"])
def test_a_size_without_a_right_unit_is_none(text: str) -> None:
    assert read_size(text) is None


@given(st.integers(0, 2**62), st.sampled_from(["bytes", "elements"]))
def test_a_shown_size_reads_back(count: int, unit: str) -> None:
    assert read_size(str(Size(count, unit))) == Size(count, unit)


def test_elements_become_bytes_by_their_type() -> None:
    assert Size(10, "elements").bytes(2) == 20
    assert Size(10).bytes(2) == 10


@given(st.integers(1, 2**50))
def test_a_shown_bandwidth_reads_back(rate: int) -> None:
    assert read_bandwidth(show_bandwidth(float(rate))) == float(rate)


def test_network_people_count_bits() -> None:
    assert read_bandwidth("400Gbit/s") == 50e9
    assert read_bandwidth("300GB/s") == 300e9
    assert read_bandwidth("300GB") is None


def test_reports_show_three_digits() -> None:
    assert show_bytes(1.5 * 2**30) == "1.5 GiB"
    assert show_bytes(12) == "12 B"
    assert show_count(124_439_808) == "124.4 M"
    assert show_count(176_247_271_424) == "176.2 B"


@given(st.integers(1, 5000))
def test_divisors_divide(number: int) -> None:
    found = divisors(number, 10**6)
    assert found == [d for d in range(1, number + 1) if number % d == 0]
