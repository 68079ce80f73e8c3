"""Ranks and their places."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.diagnostics import MeshError
from autoshard.mesh import Axis, Mesh

NAMES = ("pp", "dp", "ep", "tp")
meshes = st.lists(st.integers(1, 4), max_size=4).map(
    lambda sizes: Mesh(tuple(Axis(n, s) for n, s in zip(NAMES, sizes, strict=False)))
)


def test_the_last_axis_is_neighbouring_ranks() -> None:
    mesh = Mesh.of(pp=2, dp=2, tp=2)
    assert mesh.group(0, "tp") == (0, 1)
    assert mesh.group(0, "dp") == (0, 2)
    assert mesh.group(5, "pp") == (1, 5)
    assert mesh.coordinate(5) == {"pp": 1, "dp": 0, "tp": 1}
    assert mesh.world_size == 8


@given(meshes)
def test_rank_and_coordinate_are_inverse(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        assert mesh.rank(**mesh.coordinate(rank)) == rank


@given(meshes, st.sampled_from(NAMES))
def test_the_groups_of_an_axis_hold_each_rank_once(mesh: Mesh, axis: str) -> None:
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {mesh.size(axis)}
    for group in groups:
        places = [mesh.coordinate(rank) for rank in group]
        assert all(p.get(n) == places[0].get(n) for p in places for n in mesh.names if n != axis)


def test_a_union_of_axes_is_all_ranks_that_differ_along_any() -> None:
    mesh = Mesh.of(dp_replicate=2, pp=2, dp_shard=2)
    assert mesh.group(0, ("dp_replicate", "dp_shard")) == (0, 1, 4, 5)
    assert mesh.group(0, "dp") == (0, 1, 4, 5)
    assert mesh.size("dp") == 4
    assert mesh.index(5, "dp") == 3


def test_an_axis_that_is_missing_has_one_place() -> None:
    mesh = Mesh.of(tp=2)
    assert mesh.size("pp") == 1
    assert mesh.group(1, "pp") == (1,)
    assert Mesh().world_size == 1
    assert Mesh().group(0, "dp") == (0,)


def test_a_mesh_prints_its_product() -> None:
    assert str(Mesh.of(pp=2, tp=4)) == "pp 2 x tp 4 = 8"
    assert str(Mesh()) == "one rank = 1"


def test_wrong_meshes_and_places_are_refused() -> None:
    with pytest.raises(MeshError, match="has size 0"):
        Mesh.of(tp=0)
    with pytest.raises(MeshError, match="comes twice"):
        Mesh((Axis("tp", 2), Axis("tp", 2)))
    with pytest.raises(MeshError, match="rank 2 is outside a mesh of 2 ranks"):
        Mesh.of(tp=2).coordinate(2)
    with pytest.raises(MeshError, match="tp = 3 is outside an axis of size 2"):
        Mesh.of(tp=2).rank(tp=3)
    with pytest.raises(MeshError, match="no axis `pp`"):
        Mesh.of(tp=2).rank(pp=1)
