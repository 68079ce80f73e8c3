"""What decides a program: each ingredient that changes changes the key, nothing else does.

That another process finds the same key is shown where several meet: tests/distributed.
"""

import functools
import types

import pytest
import torch
from torch import nn

from autoshard.cache.digest import Digest, Opaque
from autoshard.cache.key import model_parts, program_key, versions
from autoshard.diagnostics import CaptureError
from autoshard.dsl.load import load
from autoshard.frontend import capture_plan, compile_plan
from autoshard.ir.save import captured_bytes
from autoshard.source import Source
from autoshard.testing.models import tiny_gpt, token_batch

PLAN = "autoshard 1\nbatch { micro_batch_size = 2 }\n"
CODE = """
import torch
from torch import nn
SCALE = 1.0
def helper(x):
    return x * SCALE
class Net(nn.Module):
    power = 2
    def __init__(self, p=0.1):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout(p)
        self.options = {"eps": 1e-5, "names": {"a", "b"}}
    def forward(self, x):
        return self.step(self.drop(self.fc(x))).sum()
    def step(self, x):
        return helper(x) ** self.power
    def other(self, x):
        return x
"""


def net(code=CODE, **options):
    """Return a model whose code is ``code``, of a module that is loaded from no file."""
    module = types.ModuleType("a_model")
    exec(compile(code, "a_model.py", "exec"), vars(module))
    return module.Net(**options)


def of(*values):
    made = Digest()
    for value in values:
        made.add(value)
    return made.text()


def test_equal_models_have_equal_digests():
    assert of(net()) == of(net())


@pytest.mark.parametrize(
    "old, new",
    [
        ("x * SCALE", "x / SCALE"),
        ("SCALE = 1.0", "SCALE = 2.0"),
        ("power = 2", "power = 3"),
        ("self.step(self.drop(self.fc(x)))", "self.drop(self.step(self.fc(x)))"),
        ('"eps": 1e-5', '"eps": 1e-6'),
        ('{"a", "b"}', '{"a", "c"}'),
        ("nn.Linear(4, 4)", "nn.Linear(4, 4, bias=False)"),
    ],
)
def test_what_the_model_computes_is_in_its_digest(old, new):
    assert old in CODE
    assert of(net(CODE.replace(old, new))) != of(net())


def test_code_that_forward_does_not_reach_is_not():
    # Not even its lines may move: they are what messages about nodes name.
    assert of(net(CODE.replace("        return x\n", "        return -x\n"))) == of(net())


def _change(model, what):
    if what == "dropout":
        model.drop.p = 0.2
    elif what == "mode":
        model.drop.eval()
    elif what == "attribute":
        model.options["eps"] = 1e-4
    elif what == "frozen":
        model.fc.weight.requires_grad_(False)
    elif what == "dtype":
        model.double()
    elif what == "forward of one module":
        model.fc.forward = lambda x: x
    elif what == "tie":
        model.fc2 = model.fc
    elif what == "table":
        model.table = torch.arange(3)
    return model


CHANGES = ("dropout", "mode", "attribute", "frozen", "dtype", "forward of one module", "tie")


@pytest.mark.parametrize("what", (*CHANGES, "table"))
def test_state_of_the_model_is_in_its_digest(what):
    assert of(_change(net(), what)) != of(net())


def test_values_of_parameters_are_not_but_those_of_plain_tensors_are():
    model = net()
    before = of(model)
    with torch.no_grad():
        model.fc.weight.add_(1)
    assert of(model) == before
    model.table = torch.zeros(3)
    before = of(model)
    model.table[1] = 1
    assert of(model) != before


def test_closures_defaults_and_partials_are_followed():
    def scaled(by, add=0):
        return lambda out, batch, plus=add: out * by + plus

    losses = [scaled(1), scaled(2), scaled(1, 3)]
    losses += [functools.partial(losses[0], plus=1), functools.partial(losses[0], plus=2)]
    assert len({of(loss) for loss in losses}) == len(losses)
    assert of(scaled(1)) == of(losses[0])


def test_a_patched_function_of_torch_is_seen(monkeypatch):
    before = of(net())
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)
    assert of(net()) != before


def test_what_can_not_be_looked_into_is_refused():
    model = net()
    model.held = open(__file__, "rb")  # noqa: SIM115 - any object of C that says nothing
    with model.held, pytest.raises(Opaque, match="BufferedReader"):
        of(model)


def test_cycles_and_lists_of_modules_end():
    model = net()
    model.me, model.parts = [model], [model.fc]
    model.parts.append(model.parts)
    assert of(model) == of(model)


def hooked(scale):
    """Return a model whose forward hooks a value: capture drops the hook without a word."""

    class Hooked(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(lambda gradient: gradient * scale)
            return y.sum()

    return Hooked(4, 4)


def test_code_that_the_captured_graph_does_not_show_is_in_the_digest():
    plan, batch = load(Source("x.plan", PLAN)).require(), (torch.randn(2, 4),)
    one, two = (captured_bytes(capture_plan(hooked(by), plan, batch)) for by in (1, 3))
    assert one == two  # a hit by the graph alone would skip the comparison that finds the hook
    assert of(hooked(1)) == of(hooked(1)) != of(hooked(3))
    with pytest.raises(CaptureError, match="is not the eager model"):
        compile_plan(hooked(3), plan, batch, compare=True, until="canonicalize")


# the key of a program -----------------------------------------------------------------------------
def key(plan=PLAN, batch=None, world=None, training=True, loss=None, graph=b"", **options):
    model, _, own = tiny_gpt(layers=1, batch=2, length=4, **options)
    parts = model_parts(model, loss or own)
    parsed = load(Source("x.plan", plan)).require()
    batch = batch or token_batch(2, 4)
    return program_key("Net", parts, graph, parsed, batch, world, training).parts


def changed(one, other):
    return {name for name in one if one[name] != other[name]}


def test_each_ingredient_changes_its_own_part_of_the_key(monkeypatch):
    first = key()
    assert key() == first
    assert changed(first, key(PLAN + "zero { stage = 1 }\n")) == {"plan"}
    assert changed(first, key(PLAN + "# lines move\n")) == {"plan"}
    assert changed(first, key(batch=token_batch(2, 5))) == {"batch"}
    assert changed(first, key(batch={**token_batch(2, 4), "scale": 2.0})) == {"batch"}
    assert changed(first, key(batch=tuple(token_batch(2, 4).values()))) == {"batch"}
    assert changed(first, key(world=2)) == changed(first, key(training=False)) == {"mode"}
    assert changed(first, key(graph=b"another")) == {"graph"}
    assert changed(first, key(loss=lambda out, batch: out.sum())) == {"loss"}
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    assert changed(first, key()) == {"settings"}


def test_the_versions_and_the_compiler_s_own_code_are_in_the_key(monkeypatch, tmp_path):
    fresh = versions.__wrapped__
    texts = {fresh(), fresh(tmp_path / "autoshard")}
    assert fresh() in texts
    for place in ("autoshard", "passes"):
        (tmp_path / place).mkdir()
        for text in ("x = 1", "x = 2"):
            (tmp_path / place / "a.py").write_text(text)
            texts.add(fresh(tmp_path / "autoshard"))
    monkeypatch.setattr(torch, "__version__", "2.99")
    texts.add(fresh())
    assert len(texts) == 7


def test_the_text_of_a_schedule_s_file_is_in_the_key(tmp_path):
    file = tmp_path / "s.csv"
    plan = PLAN + f'mesh {{ pp = 2 }}\npipeline {{ schedule = csv("{file}") }}\n'
    file.write_text("0F0,0B0\n1F0,1B0\n")
    first = key(plan)
    file.write_text("0F0,,0B0\n1F0,1B0\n")
    assert changed(first, key(plan)) == {"plan"}
