"""Compare a model under tensor rules with itself on one process, through virtual ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from autoshard.compiler.pass_base import PassContext
from autoshard.dsl.resolve import Resolved, ResolvedRule
from autoshard.ir.capture import capture
from autoshard.ir.graph_function import BATCH, BUFFER, NORMALIZER, PARAM, RNG
from autoshard.ir.placement import shard_tensor
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.mesh import Mesh
from autoshard.passes.insert_collectives import InsertCollectives
from autoshard.passes.localize_shapes import LocalizeShapes
from autoshard.passes.propagate_placements import PropagatePlacements
from autoshard.passes.shard_params import ShardParams
from autoshard.plan import Plan, Rule, Style
from autoshard.source import Source, Span
from tests.passes.ranks import interpret, on_ranks

TENSOR_PASSES = (ShardParams(), PropagatePlacements(), InsertCollectives(), LocalizeShapes())
SEED, STEP = 7, 3


def parse_style(text: str) -> Style:
    """Return ``colwise(parts=3)`` as a Style."""
    name, _, rest = text.partition("(")
    options = eval(f"dict({rest.removesuffix(')')})") if rest else {}
    return Style(name, options)


def resolve(model: nn.Module, rules: dict[str, str], mesh: Mesh, microbatches: int = 1) -> Resolved:
    """Bind globs to module paths and parameter names, as the plan language does."""
    text = "\n".join(f"{glob}: {style}" for glob, style in rules.items())
    source = Source("test.plan", text)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found, start = {}, 0
    for glob, style in rules.items():
        rule = Rule(glob, parse_style(style), span=Span(source, start, start + len(glob)))
        start += len(f"{glob}: {style}") + 1
        matches = [name for name in names if fnmatchcase(name, glob)]
        assert matches, f"{glob} matches nothing"
        for name in matches:
            found[name] = ResolvedRule(name, rule.style.name, rule.style.options, rule)
    return Resolved(Plan(), mesh, 1, microbatches, microbatches, tensor=found)


def captured(model: nn.Module, batch: object, tp: int = 1, loss=None) -> Program:
    """Return the plain program; in float64 throughout when the model is."""
    program = capture(model, batch, loss, mesh=Mesh.of(tp=tp), compare=False)
    is_double = all(p.dtype == torch.float64 for p in model.parameters())
    return promote(program) if is_double else program


def apply_passes(
    program: Program, model: nn.Module, rules: dict[str, str], passes=()
) -> PassContext:
    """Run passes on the program: all tensor passes, or those given."""
    ctx = PassContext(resolve(model, rules, program.mesh))
    for step in passes or TENSOR_PASSES:
        ctx.pass_name = step.name
        step.run(program, ctx)
        program.forward.graph.lint()
    return ctx


def compiled(
    model: nn.Module, batch: object, rules: dict[str, str], tp: int = 2, loss=None, passes=()
) -> tuple[Program, PassContext]:
    """Return the model's program after the tensor passes."""
    program = captured(model, batch, tp, loss)
    return program, apply_passes(program, model, rules, passes)


@dataclass
class Outcome:
    """Loss and gradients by parameter name."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor]


def promote(program: Program) -> Program:
    """Compute in float64 where the model casts to float32: those casts would hide differences."""
    rewriter = Rewriter(program.forward, "promote")
    for node in program.forward.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = _promoted((node.args, node.kwargs))
            rewriter.refake(node)
    return program


def _promoted(value):
    if value is torch.float32:
        return torch.float64
    if isinstance(value, (tuple, list)):
        return type(value)(_promoted(v) for v in value)
    if isinstance(value, dict):
        return {k: _promoted(v) for k, v in value.items()}
    return value


def reference(program: Program, model: nn.Module, batch: dict) -> Outcome:
    """Run a program to which no pass was applied, on one rank."""
    return run_ranks(program, model, batch, 1)[0]


def run_ranks(program: Program, model: nn.Module, batch: dict, tp: int) -> list[Outcome]:
    """Run the local program on every virtual rank."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())

    def work(comm) -> Outcome:
        inputs, leaves = [], {}
        for port, node in zip(program.forward.inputs, program.forward.placeholders, strict=True):
            if port.kind in (PARAM, BUFFER):
                value = program.constants.get(port.name)
                value = state[port.name].detach() if value is None else value
                if port.name in program.params:
                    value = local_parameter(program, port.name, value, comm.index("tp"))
                if port.kind == PARAM:
                    value = value.clone().requires_grad_(program.params[port.name].requires_grad)
                    leaves[port.name] = value
            elif port.kind == BATCH:
                value = batch[port.name]
            elif port.kind == RNG:
                value = torch.tensor([SEED, STEP, 0])
            elif port.kind == NORMALIZER:
                value = torch.tensor(1.0)
            assert tuple(value.shape) == tuple(node.meta["val"].shape), port
            inputs.append(value)
        (loss,) = interpret(program.forward, inputs)
        loss.backward()
        return Outcome(loss.detach(), {n: v.grad for n, v in leaves.items()})

    return on_ranks(tp, work)


def local_parameter(program: Program, name: str, value: torch.Tensor, index: int) -> torch.Tensor:
    """Return rank ``index``'s part of a parameter, padded with zeros where the plan pads."""
    spec = program.params[name]
    if spec.padded:
        whole = value.new_zeros(spec.padded)
        whole[tuple(slice(n) for n in value.shape)] = value
        value = whole
    return shard_tensor(value, spec.placements, program.mesh, {"tp": index}).contiguous()


def assert_equal(
    model: nn.Module, batch: dict, rules: dict[str, str], tp: int = 2, loss=None, passes=()
) -> Program:
    """Check loss and every gradient on every rank against the plain model, in float64."""
    model = model.double()
    program = captured(model, batch, tp, loss)
    expected = reference(program, model, batch)
    apply_passes(program, model, rules, passes)
    assert expected.loss.dtype == torch.float64
    scale = max(float(g.abs().max()) for g in expected.grads.values())
    for index, got in enumerate(run_ranks(program, model, batch, tp)):
        torch.testing.assert_close(got.loss, expected.loss, rtol=1e-10, atol=0)
        for name, grad in got.grads.items():
            want = local_parameter(program, name, expected.grads[name], index)
            bound = 1e-10 * (float(want.abs().max()) + scale)
            assert float((grad - want).abs().max()) <= bound, f"gradient of {name} on rank {index}"
    return program


def count_collectives(program: Program) -> Counter:
    """Count the forward graph's own operators by name."""
    names = (str(n.target) for n in program.forward.graph.nodes if n.op == "call_function")
    return Counter(n.split(".")[1] for n in names if n.startswith("autoshard."))
