"""Z1: a tied weight whose rows shards don't end at is trained whole, its last row too."""

import pytest

from autoshard.runtime.gradients import Gradients
from autoshard.testing.models import Built, tiny_gpt
from tests.bank.equal import assert_equal, compare

STEPS, VOCAB = 20, 97
PLAN = """
mesh {{ dp = {dp} }}
batch {{ micro_batch_size = 1 }}
zero {{ stage = 3, param_persistence_threshold = 0KiB }}
"""


def uneven(dp: int) -> Built:
    """Return a model of 97 words of width 6: neither 2 nor 4 ranks store whole rows."""
    return tiny_gpt(layers=1, width=6, heads=2, vocab=VOCAB, batch=dp, length=6)


@pytest.mark.parametrize("dp", (2, 4))
def test_twenty_steps_move_every_row_as_one_process_does(dp: int) -> None:
    built = uneven(dp)
    found = assert_equal(built, PLAN.format(dp=dp), steps=STEPS)
    assert found.ours[0].norm > 1  # clipping had something to do
    first, last = built[0].wte.weight, found.ours[-1].params["wte.weight"]
    assert last.shape == (VOCAB, 6) and (last - first).abs().amax(1).gt(0).all()
    assert found.ours[0].grads["wte.weight"].abs().sum(1).gt(0).all()


def test_a_last_row_that_is_not_trained_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = Gradients.attach

    def without_the_last_row(self: Gradients, factor: float = 1.0) -> None:
        self.finish()
        slot, storage = self._storage.layout.slots["wte.weight"], self._storage
        if storage.own_range(slot)[1] == slot.numel:
            storage.own_part(self._results[slot.bucket], slot)[-6:] = 0.0
        attach(self, factor)

    monkeypatch.setattr(Gradients, "attach", without_the_last_row)
    wrong = compare(uneven(2), PLAN.format(dp=2), steps=1).first_wrong()
    assert wrong is not None and wrong.what == "grad wte.weight"
