"""The GPT example: plain model, real text, batches that don't know the mesh."""

import ast
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.loading import ENVIRONMENT, EXAMPLES, ROOT, load

GPT = EXAMPLES / "gpt"
data, demo, gpt = load("gpt/data"), load("gpt/demo"), load("gpt/model")


def test_the_model_file_knows_nothing_of_autoshard() -> None:
    imported = {
        name.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse((GPT / "model.py").read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert imported == {"collections.abc", "dataclasses", "torch", "torch.nn"}


def test_build_gives_a_model_a_batch_and_a_loss_near_that_of_a_guess() -> None:
    model, batch, loss_fn = gpt.build()
    loss = loss_fn(model(batch["tokens"]), batch)
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)


def test_build_gives_equal_weights_every_time() -> None:
    first, second = gpt.build()[0].state_dict(), gpt.build()[0].state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_token_sees_a_later_one() -> None:
    model, batch, _ = gpt.build()
    tokens = batch["tokens"].clone()
    before = model(tokens)
    tokens[:, 40:] = 0
    assert torch.equal(model(tokens)[:, :40], before[:, :40])


@pytest.mark.parametrize("dp_size", [2, 4, 16])
def test_the_global_batch_is_the_same_for_every_dp_size(dp_size: int) -> None:
    whole = list(data.batches(3))
    shares = [list(data.batches(3, rank, dp_size)) for rank in range(dp_size)]
    for step, batch in enumerate(whole):
        for name, values in batch.items():
            assert torch.equal(torch.cat([share[step][name] for share in shares]), values)


def test_targets_are_the_tokens_that_follow() -> None:
    (batch,) = data.batches(1)
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_batches_of_two_steps_differ() -> None:
    first, second = data.batches(2)
    assert not torch.equal(first["tokens"], second["tokens"])


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="16 can't be split over 3"):
        next(data.batches(1, 0, 3))


def test_another_text_under_a_pinned_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.platform, "python_version", lambda: "3.11.7")
    with pytest.raises(ValueError, match=r"3\.11\.7 is not the released text"):
        data._check(hashlib.sha256(b"another text").hexdigest())


def test_the_text_of_an_unknown_version_is_named_and_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data.platform, "python_version", lambda: "3.99.0")
    data._check("0123456789abcdef0")
    assert "CPython 3.99.0 has no pinned checksum: 0123456789abcdef" in capsys.readouterr().err


def test_plain_training_learns(tmp_path: Path) -> None:
    command = [sys.executable, GPT / "train.py", "--plan", "none", "--steps", "20"]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 3, done.stderr
    assert losses[0] > 5.4 and losses[-1] < 4.0


def test_the_demo_fails_when_the_curves_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.compare([4.0, 2.0], [4.0, 2.0]) == 0.0
    assert demo.compare([4.0, 2.0], [4.0, 2.001]) > demo.LARGEST_DIFFERENCE
    assert "MORE THAN" in capsys.readouterr().out
