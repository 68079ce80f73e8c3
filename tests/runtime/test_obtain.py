"""Programs out of the cache train as compiled ones do, bit by bit; bad entries are made again."""

import contextvars
import os
import sys
from array import array

import pytest
import torch

import autoshard
from autoshard import programs
from autoshard.diagnostics import CaptureError
from autoshard.ir.capture import capture
from autoshard.ir.save import captured_bytes
from autoshard.ir.save_values import SaveError
from autoshard.mesh import Mesh
from autoshard.testing.models import tiny_gpt, token_batch

PLAN = "autoshard 1\nbatch { micro_batch_size = 2, num_microbatches = 2 }\nzero { stage = 1 }\n"


def train(cache, plan=PLAN, dropout=0.1, **options):
    """Return the cache's line of the report, and everything two steps and an evaluation give."""
    torch.manual_seed(3)
    model, example, loss = tiny_gpt(layers=1, batch=4, length=6, dropout=dropout)
    engine = autoshard.parallelize(model, plan, example=example, loss=loss, cache=cache, **options)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    got = []
    for step in range(2):
        got.append(engine.forward_backward(token_batch(4, 6, seed=step)))
        optimizer.step()
        optimizer.zero_grad()
    got += [engine.evaluate(example), *engine.full_state_dict().values()]
    return engine.report(), got


def line(report, word="cache"):
    return next(text for text in report.lines if text.startswith(word)).split(None, 1)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cache with the programs of one run, training and evaluation, and what that run gave."""
    place = tmp_path_factory.mktemp("cache")
    report, got = train(place)
    assert line(report).startswith("miss: compiled in")
    assert line(report).endswith("kept")
    return place, got


def compiles(monkeypatch):
    """Count the calls of the compiler from here on."""
    calls, inner = [], programs.compile_plan

    def counted(*args, **options):
        calls.append(args)
        return inner(*args, **options)

    monkeypatch.setattr(programs, "compile_plan", counted)
    return calls


def test_a_hit_compiles_nothing_and_trains_bit_by_bit_as_a_miss(folder, monkeypatch):
    place, expected = folder
    calls = compiles(monkeypatch)
    report, got = train(place)
    assert not calls
    assert line(report).startswith("hit: compiled in")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for word in ("capture", "types", "erasure", "order"):
        assert line(report, word).endswith("(cached)"), word


@pytest.mark.parametrize("harm", ["cut", "flip"])
def test_a_damaged_entry_is_rebuilt_with_a_note(folder, harm):
    place, expected = folder
    for path in place.iterdir():
        raw = path.read_bytes()
        path.write_bytes({"cut": raw[:-9], "flip": raw[:-9] + bytes(9)}[harm])
    report, got = train(place)
    assert "miss (the entry was" in line(report)
    assert "is made again): compiled in" in line(report)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert line(train(place)[0]).startswith("hit")


def test_an_entry_that_is_whole_but_no_program_is_rebuilt(folder, monkeypatch):
    place, expected = folder
    with monkeypatch.context() as patch:
        patch.setattr("autoshard.runtime.obtain.to_bytes", lambda program: b"no program")
        for path in place.iterdir():
            path.unlink()
        train(place)
    report, got = train(place)
    assert "miss (the entry could not be read)" in line(report)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def start(cache, plan=PLAN, dropout=0.1, **options):
    """Return the cache's line of an engine's report; nothing is trained."""
    model, example, loss = tiny_gpt(layers=1, batch=4, length=6, dropout=dropout)
    options = {"example": example, "loss": loss, "cache": cache, **options}
    return line(autoshard.parallelize(model, plan, **options).report())


def test_another_dropout_or_plan_is_a_miss_that_says_so(folder):
    place, _ = folder
    assert "(changed since the nearest entry: model, graph)" in start(place, dropout=0.2)
    plan = PLAN.replace("stage = 1", "stage = 0")
    assert "(changed since the nearest entry: plan)" in start(place, plan=plan)


def test_an_entry_that_was_not_proved_is_not_taken_for_one_that_was(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    assert start(True, verify=False).startswith("miss: compiled in")
    assert start(True, verify=False).startswith("hit")
    assert start(True).startswith("miss (the entry was not proved)")
    assert start(True).startswith("hit")
    before = [path.stat().st_mtime_ns for path in tmp_path.iterdir()]
    assert start(False).startswith("off: compiled in")
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == before


def test_a_model_that_can_not_be_looked_into_is_compiled_each_time(tmp_path):
    model, example, loss = tiny_gpt(layers=1, batch=4, length=6)
    with open(__file__, "rb") as model.held:
        engine = autoshard.parallelize(model, PLAN, example=example, loss=loss, cache=tmp_path)
    expected = "not used (the model or the loss holds a value of type 'BufferedReader')"
    assert line(engine.report()).startswith(expected)


def test_a_model_that_is_refused_leaves_no_entry(tmp_path):
    model, example, loss = tiny_gpt(layers=1, batch=4, length=6)
    model.head.register_forward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match="hook"):
        autoshard.parallelize(model, PLAN, example=example, loss=loss, cache=tmp_path)
    assert not list(tmp_path.iterdir())


CONTEXT = contextvars.ContextVar("by", default=1.0)
ARRAY = array("d", [1.0])


def hidden(name):
    """Return a number in ways that no look at the code that reads it shows."""
    if name == "array":
        return ARRAY[0]
    if name == "context":
        return CONTEXT.get()
    if name == "environment":
        return float(os.environ["AUTOSHARD_TEST_BY"])
    return getattr(sys.modules[__name__], "CHOSEN")  # noqa: B009 - by a name made at run time


CHOSEN = 1.0


def tell(name, by, monkeypatch):
    """Let ``hidden`` return another number."""
    if name == "array":
        ARRAY[0] = by
    elif name == "context":
        CONTEXT.set(by)
    elif name == "environment":
        monkeypatch.setenv("AUTOSHARD_TEST_BY", str(by))
    else:
        monkeypatch.setattr(sys.modules[__name__], "CHOSEN", by)


def small(folder, forward):
    """Return the cache's line, and the loss, of a layer and what ``forward`` makes of it."""
    torch.manual_seed(0)
    plan, x = "autoshard 1\nbatch { micro_batch_size = 2 }\n", torch.ones(2, 4)
    model = torch.nn.Linear(4, 4)
    options = {"loss": lambda out, batch: forward(out).sum(), "cache": folder}
    engine = autoshard.parallelize(model, plan, example=(x,), **options)
    return line(engine.report()), engine.forward_backward((x,)).item()


@pytest.mark.parametrize("name", ["array", "context", "environment", "getattr"])
def test_what_no_look_at_code_shows_is_a_miss_all_the_same(name, tmp_path, monkeypatch):
    def forward(x):
        return x * hidden(name)

    tell(name, 1.0, monkeypatch)
    _, before = small(tmp_path, forward)
    assert small(tmp_path, forward)[0].startswith("hit")
    tell(name, 2.0, monkeypatch)
    said, after = small(tmp_path, forward)
    assert said.startswith("miss (changed since the nearest entry: graph)")
    assert after == pytest.approx(2 * before)


def test_an_operator_of_another_library_keeps_its_program_out_of_the_cache(tmp_path):
    with torch.library._scoped_library("breaker", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        program = captured(lambda x: torch.ops.breaker.twice(x))
        with pytest.raises(SaveError, match=r"`breaker\.twice\.default` is a library's operator"):
            captured_bytes(program)


def captured(forward):
    """Return the evaluating capture of a layer and what ``forward`` makes of it."""
    x = torch.ones(2, 4)
    options = {"mesh": Mesh.of(), "training": False, "compare": False}
    return capture(torch.nn.Linear(4, 4), (x,), lambda out, batch: forward(out).sum(), **options)
