"""The norm counts every element once, wherever it lies."""

import pytest
import torch

from autoshard.diagnostics import AutoshardError
from autoshard.runtime.clip import clip_grad_norm
from autoshard.testing.lockstep import run_ranks
from tests.runtime.toy import Toy

LAYOUTS = [dict(), dict(tp=2), dict(pp=2), dict(dp=2), dict(dp=3, zero=3), dict(dp=2, pp=2, tp=2)]


def norms(layout, grads, **options):
    """Give every rank its part of ``grads`` and clip; return norms and one rank's gradients."""
    toy = Toy(**layout)

    def body(exe):
        for name, value in grads.items():
            exe.storage.write(name, value)
        for parameter in exe.storage.parameters.values():
            parameter.grad = parameter.detach().clone()
        total = clip_grad_norm(exe.storage, exe.comm, 1.0, **options)
        return total, {n: p.grad for n, p in exe.storage.parameters.items()}

    return run_ranks(toy.program(), toy.values(), body)[1]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_norm_is_that_of_torch_and_equal_on_all_ranks(layout, norm_type):
    grads = {n: v * 3 for n, v in Toy().values().items()}
    plain = [torch.nn.Parameter(v) for v in grads.values()]
    for parameter in plain:
        parameter.grad = parameter.detach().clone()
    expected = torch.nn.utils.clip_grad_norm_(plain, 1.0, norm_type)
    results = norms(layout, grads, norm_type=norm_type)
    assert all(torch.equal(total, results[0][0]) for total, _ in results)
    total, clipped = results[0]
    assert type(total) is type(expected) and total.dtype == expected.dtype
    assert (total - expected).abs() <= 1e-12 * expected
    if layout == {}:
        for mine, theirs in zip(clipped.values(), plain, strict=True):
            assert torch.allclose(mine, theirs.grad, rtol=1e-12)


def test_a_rank_that_trains_nothing_returns_the_norm_in_the_dtype_of_all_others():
    toy = Toy(pp=2)
    program = toy.program()
    frozen = [spec.fqn for spec in program.params if spec.homes == (1,)]
    for name in frozen:
        program.params.update(name, requires_grad=False)

    def body(exe):
        for parameter in exe.storage.parameters.values():
            if parameter.requires_grad:
                parameter.grad = parameter.detach().clone()
        return clip_grad_norm(exe.storage, exe.comm, 1.0)

    first, second = run_ranks(program, toy.values(), body)[1]
    assert frozen and first > 0 and first.dtype == second.dtype == torch.float64
    assert torch.equal(first, second)


def test_infinity_on_one_rank_is_seen_by_all():
    grads = Toy().values()
    grads["b.weight"][0, 0] = float("inf")
    results = norms(dict(pp=2, dp=2), grads)
    assert all(total.isinf() for total, _ in results)


def test_a_nonfinite_norm_is_an_error_on_request():
    grads = Toy().values()
    grads["a.weight"][0, 0] = float("nan")
    with pytest.raises(AutoshardError, match="the norm of the gradients is nan"):
        norms(dict(pp=2), grads, error_if_nonfinite=True)


def test_no_gradients_have_norm_zero():
    toy = Toy(tp=2)
    totals = run_ranks(
        toy.program(), toy.values(), lambda exe: clip_grad_norm(exe.storage, exe.comm, 1.0)
    )[1]
    assert [t.item() for t in totals] == [0.0, 0.0]
