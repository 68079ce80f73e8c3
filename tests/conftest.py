"""What every test shares: one thread, no network, and markers that say why they skip."""

import os

# Before anything imports torch: two workers with one thread each fill two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What is under test must compile; the tests of the cache name a folder of their own.
os.environ["AUTOSHARD_CACHE"] = "off"

import sys

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch that rewrites the expected part of file cases."""
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the expected output of tests/cases; review the diff like code",
    )


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Return whether file cases should be rewritten instead of compared."""
    return request.config.getoption("--update-golden")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start each test from one random state, so that no order of tests matters."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `cuda` with the reason where no device is visible."""
    if item.get_closest_marker("cuda") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
