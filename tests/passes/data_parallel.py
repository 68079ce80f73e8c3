"""Run a globalized program in parts and compare the sum with the whole batch."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.compiler.pass_base import PassContext
from autoshard.ir.capture import capture
from autoshard.ir.graph_function import BATCH, BUFFER, NORMALIZER, PARAM, RNG
from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from autoshard.passes.globalize_loss import GlobalizeLoss
from tests.passes.ranks import interpret, on_ranks
from tests.passes.tensor_parallel import SEED, STEP, Outcome, promote, resolve


def globalized(
    model: nn.Module, microbatch: dict, loss=None, *, dp: int = 2, microbatches: int = 2
) -> tuple[Program, PassContext]:
    """Return the program of one micro-batch after globalize-loss."""
    program = capture(model, microbatch, loss, mesh=Mesh.of(dp=dp), compare=False)
    if all(p.dtype == torch.float64 for p in model.parameters()):
        promote(program)
    program.num_microbatches = microbatches
    ctx = PassContext(resolve(model, {}, program.mesh, microbatches), pass_name="globalize-loss")
    GlobalizeLoss().run(program, ctx)
    program.forward.graph.lint()
    return program, ctx


def run_parts(program: Program, model: nn.Module, batch: dict, parts: int) -> Outcome:
    """Run one program on every part of the batch and add up losses and gradients."""
    pieces = [
        {k: v.chunk(parts)[i] if v.dim() and v.shape[0] > 1 else v for k, v in batch.items()}
        for i in range(parts)
    ]
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    weights = {
        name: state[name].detach().clone().requires_grad_() for name in program.forward.named(PARAM)
    }

    def work(comm) -> Outcome:
        counts = _counts(program, pieces)
        total = 0.0
        for index, piece in enumerate(pieces):
            rows = next(v for v in piece.values() if v.dim()).shape[0]
            inputs = []
            for port in program.forward.inputs:
                if port.kind == PARAM:
                    inputs.append(weights[port.name])
                elif port.kind == BUFFER:
                    constant = program.constants.get(port.name)
                    inputs.append(state[port.name] if constant is None else constant)
                elif port.kind == BATCH:
                    inputs.append(piece[port.name])
                elif port.kind == RNG:
                    inputs.append(torch.tensor([SEED, STEP, index * rows]))
                elif port.kind == NORMALIZER:
                    inputs.append(1.0 / counts[port.name])
            (loss,) = interpret(program.forward, inputs)
            loss.backward()
            total = total + loss.detach()
        return Outcome(total, {n: w.grad for n, w in weights.items() if w.grad is not None})

    return on_ranks(1, work)[0]


def _counts(program: Program, pieces: list[dict]) -> dict[str, torch.Tensor]:
    if program.prelude is None:
        return {}
    names = [port.name for port in program.prelude.inputs]
    held = [{**piece, **program.constants} for piece in pieces]
    rows = [interpret(program.prelude, [given[n] for n in names]) for given in held]
    totals = [torch.stack(counts).sum(0).double() for counts in zip(*rows, strict=True)]
    return dict(zip((p.name for p in program.prelude.outputs), totals, strict=True))


def assert_parts_add_up(
    model: nn.Module, batch: dict, loss=None, *, parts: int = 4
) -> tuple[Program, PassContext]:
    """Check that the parts' losses and gradients sum to those of the whole batch."""
    model = model.double()
    first = {k: v.chunk(parts)[0] if v.dim() and v.shape[0] > 1 else v for k, v in batch.items()}
    dp = 2 if parts % 2 == 0 else 1
    program, ctx = globalized(model, first, loss, dp=dp, microbatches=parts // dp)
    got = run_parts(program, model, batch, parts)
    whole = promote(capture(model, batch, loss, mesh=Mesh.of(dp=1), compare=False))
    expected = run_parts(whole, model, batch, 1)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-10, atol=1e-14)
    assert got.grads.keys() == expected.grads.keys()
    scale = max(float(g.abs().max()) for g in expected.grads.values())
    for name, want in expected.grads.items():
        worst = float((got.grads[name] - want).abs().max())
        assert worst <= 1e-10 * (float(want.abs().max()) + scale), f"gradient of {name}: {worst}"
    return program, ctx
