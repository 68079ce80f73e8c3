"""The messages about wrong plans, word for word.

`pytest --update-golden` rewrites the expected texts; the diff is reviewed like code.
"""

import pytest

from tests.dsl.goldens import CASES, WRONG, messages


@pytest.mark.parametrize("name", CASES)
def test_wrong_plan_gives_this_message(name: str, update_golden: bool) -> None:
    expected = WRONG / f"{name}.txt"
    text = messages(name)
    if update_golden:
        expected.write_text(text)
    assert text == expected.read_text()


def test_every_wrong_plan_is_a_case() -> None:
    assert sorted(path.stem for path in WRONG.glob("*.plan")) == sorted(CASES)
