"""What is no graph at all is told as wrong, not as a traceback."""

from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Status
from autoshard.source import Source
from autoshard.testing.models import tiny_gpt
from autoshard.testing.plans import Layout, plan_text


def test_a_value_that_is_read_before_it_is_made_is_wrong() -> None:
    model, batch, loss = tiny_gpt(layers=1, batch=2, length=8)
    plan = load(Source("plan", plan_text("tiny_gpt", Layout(tp=2)))).require()
    program = compile_plan(model, plan, batch, loss).program
    assert static_rows(program, None)[0].status is Status.PROVED
    graph = program.stages[0].phases["F"].graph
    first = next(node for node in graph.nodes if node.op == "call_function")
    graph.output_node().prepend(first)
    types, erasure, _ = static_rows(program, None)
    assert types.status is Status.WRONG and "stage0.F" in types.findings[0]
    assert erasure.status is Status.UNPROVEN
