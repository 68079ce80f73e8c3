"""Mesh, batch, and settings that contradict each other: plans without a model."""

import pytest

from autoshard.diagnostics import PlanError
from autoshard.dsl.resolve import resolve
from tests.dsl.plans import codes, examined, only, read


def test_auto_takes_what_is_left() -> None:
    resolved = examined("mesh { pp = 2, dp = auto, tp = 2 }", world=16).resolved
    assert (resolved.mesh.size("dp"), resolved.mesh.world_size, resolved.auto) == (4, 16, None)


def test_auto_counts_as_one_while_the_number_of_processes_is_unknown() -> None:
    resolved = examined("mesh { dp = auto, tp = 2 }").resolved
    assert (resolved.mesh.world_size, resolved.auto) == (2, "dp")


@pytest.mark.parametrize(
    ("body", "world", "code", "word"),
    [
        ("mesh { tp = 2 }", 4, "AS302", "`dp = 2`"),
        ("mesh { dp = 8, tp = 2 }", 4, "AS302", "`dp = 2`"),
        ("", 2, "AS302", "the mesh has 1 place but 2 processes were started"),
        ("mesh { tp = 2 }", 1, "AS302", "1 process was started"),
        ("mesh { dp = auto, tp = 3 }", 8, "AS305", "a multiple of 3"),
        ("mesh { dp = auto, tp = auto }", 8, "AS301", "only one axis"),
        ("mesh { dp = 2, dp_shard = 2 }", 4, "AS303", "two ways to say the same"),
        ("mesh { cp = 2 }", 2, "AS306", "reserved"),
    ],
)
def test_a_mesh_that_does_not_fit(body: str, world: int, code: str, word: str) -> None:
    found = examined(body, world=world).errors[0]
    assert found.code == code
    assert word in " ".join([found.message, found.label, *found.help])


def test_a_faulty_mesh_is_not_also_said_to_be_too_small() -> None:
    loaded = read("mesh { tpp = 2 }\nbatch { global_batch_size = 7, micro_batch_size = 2 }")
    from autoshard.dsl.resolve import examine

    assert codes(loaded.errors) == ["AS101"]
    assert examine(loaded.plan, None, 8).errors == ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("micro_batch_size = 4", (4, 1, 8)),
        ("micro_batch_size = 4, num_microbatches = 3", (4, 3, 24)),
        ("micro_batch_size = 4, global_batch_size = 24", (4, 3, 24)),
        ("num_microbatches = 3, global_batch_size = 24", (4, 3, 24)),
        ("global_batch_size = 24", (12, 1, 24)),
        ("num_microbatches = 3", (1, 3, 6)),
        ("", (1, 1, 2)),
    ],
)
def test_two_of_three_give_the_third(given: str, expected: tuple[int, int, int]) -> None:
    resolved = examined(f"mesh {{ dp = 2 }}\nbatch {{ {given} }}").resolved
    batch = (resolved.micro_batch_size, resolved.num_microbatches, resolved.global_batch_size)
    assert batch == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "micro_batch_size = 4, num_microbatches = 3, global_batch_size = 25",
            ["4 x 3 microbatches x dp 2 = 24", "`global_batch_size = 24`"],
        ),
        (
            "micro_batch_size = 4, num_microbatches = 3, global_batch_size = 48",
            ["or `num_microbatches = 6`"],
        ),
        (
            "micro_batch_size = 4, num_microbatches = 3, global_batch_size = 18",
            ["or `micro_batch_size = 3`"],
        ),
        (
            "micro_batch_size = 4, global_batch_size = 20",
            ["20 is no multiple of micro_batch_size 4 x dp 2 = 8", "1, 2, 5, 10"],
        ),
        ("global_batch_size = 3", ["3 is no multiple of dp 2 = 2"]),
    ],
)
def test_a_batch_that_does_not_add_up(given: str, words: list[str]) -> None:
    found = only(examined(f"mesh {{ dp = 2 }}\nbatch {{ {given} }}").errors)
    assert found.code == "AS304"
    text = " ".join([found.message, *found.help])
    assert [word for word in words if word not in text] == []


def test_dp_is_both_axes_of_hybrid_sharding_for_the_batch() -> None:
    body = "mesh { dp_replicate = 2, dp_shard = 3 }\nbatch { micro_batch_size = 1 }"
    assert examined(body).resolved.global_batch_size == 6


@pytest.mark.parametrize(
    ("body", "code", "severity"),
    [
        ("precision { params = fp16 }", "AS501", "error"),
        ("precision { compute = fp16 }", "AS501", "error"),
        ("precision { loss_scale = dynamic }", "AS502", "warning"),
        ("mesh { dp = 2 }\nzero { stage = 1, prefetch = 2 }", "AS311", "warning"),
        ("mesh { tp = 2 }\nzero { stage = 1 }", "AS311", "warning"),
        ("mesh { dp = 2 }\nzero { stage = 3, group = dp_shard }", "AS313", "error"),
        ("mesh { dp_replicate = 2, dp_shard = 2 }\nzero { stage = 1 }", "AS311", "warning"),
        ("mesh { pp = 2, dp = 2 }\nzero { stage = 3 }", "AS310", "warning"),
        ("mesh { dp = 2 }\npipeline { schedule = gpipe }", "AS311", "warning"),
        ("mesh { dp = 2 }\ntensor { a: colwise }", "AS311", "warning"),
        ("mesh { pp = 2 }\npipeline { virtual_stages = 2 }", "AS309", "error"),
        ("mesh { pp = 2 }\npipeline { schedule = interleaved_1f1b }", "AS309", "error"),
        ("mesh { pp = 2 }\npipeline { schedule = zbv }", "AS309", "error"),
        ("mesh { pp = 2 }\npipeline { max_in_flight = 2 }", "AS311", "warning"),
        ("mesh { pp = 2 }\npipeline { split = before(a, b) }", "AS307", "error"),
        ("mesh { tp = 4 }\nassume { gpus_per_node = 2 }", "AS312", "warning"),
        ("mesh { tp = 2, dp = 4 }\nassume { gpus_per_node = 4 }", "AS312", "warning"),
        ("mesh { dp = 2 }\ntensor { sequence_parallel = on }", "AS311", "warning"),
        (
            "mesh { tp = 2 }\ntensor { sequence_parallel = on }\nassume { sequence_length = 7 }",
            "AS407",
            "error",
        ),
    ],
)
def test_settings_that_contradict_each_other(body: str, code: str, severity: str) -> None:
    found = only(examined(body).diagnostics)
    assert (found.code, found.severity.value) == (code, severity)
    assert found.span is not None


@pytest.mark.parametrize(
    "body",
    [
        "precision { params = fp16, loss_scale = dynamic }",
        "mesh { dp = 2 }\nzero { stage = 3, prefetch = 2 }",
        "mesh { dp = auto }\nzero { stage = 3 }",
        "mesh { pp = 2, dp = 2 }\nzero { stage = 3, reshard_after_forward = step }",
        "mesh { pp = 2 }\npipeline { schedule = interleaved_1f1b, virtual_stages = 3 }",
        "mesh { pp = 2 }\npipeline { schedule = zbv, virtual_stages = 2 }",
        "mesh { pp = 2 }\npipeline { split = before(a) }",
        "mesh { pp = 2 }\npipeline { split = before(a, b, c), schedule = interleaved_1f1b, "
        "virtual_stages = 2 }",
        "mesh { tp = 4 }\nassume { gpus_per_node = 4 }",
        "mesh { dp_replicate = 2, dp_shard = 2 }\nzero { stage = 3, group = dp_shard }",
    ],
)
def test_settings_that_agree_are_not_complained_about(body: str) -> None:
    assert examined(body).diagnostics == ()


def test_resolve_raises_all_errors_at_once_and_keeps_warnings() -> None:
    plan = read("mesh { dp = 2 }\nprecision { params = fp16 }\nzero { prefetch = 2 }").require()
    with pytest.raises(PlanError) as caught:
        resolve(plan, None, 3)
    assert codes(caught.value.diagnostics) == ["AS302", "AS501"]
    warned = resolve(read("mesh { dp = 2 }\nzero { prefetch = 2 }").require())
    assert codes(warned.warnings) == ["AS311"]
