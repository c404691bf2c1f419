"""Where ranks stand: the arithmetic of a mesh, its inverse, its groups, and the Comms made from it."""

from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.mesh import Mesh
from minipar.mesh.mesh import DENSE, EXPERT
from minipar.runtime.launch import run
from tests.examples import examples
from tests.strategies import mesh_sizes, num_ranks


class FakeComm:
    """As much of a Comm as a Mesh uses; keeps a list of the subgroups made."""

    def __init__(self, rank, size, made=None):
        self.rank, self.size, self.made = rank, size, [] if made is None else made

    def subgroup(self, ranks, name):
        self.made.append((name, tuple(ranks)))
        return FakeComm(ranks.index(self.rank), len(ranks))


def subsets(axes):
    return st.lists(st.sampled_from(axes), unique=True)


@given(mesh_sizes(max_ranks=64))
def test_ranks_are_numbered_with_pp_slowest_then_dp_cp_and_tp_fastest(sizes):
    mesh = Mesh(num_ranks(sizes), **sizes)
    grid = product(*(range(sizes[axis]) for axis in DENSE))
    assert [mesh.coordinates_of(r)[:4] for r in range(num_ranks(sizes))] == list(grid)


@given(mesh_sizes(max_ranks=64))
def test_coordinates_and_ranks_are_each_others_inverse_in_both_grids(sizes):
    mesh = Mesh(num_ranks(sizes), **sizes)
    for rank in range(num_ranks(sizes)):
        coordinates = mesh.coordinates_of(rank)._asdict()
        assert mesh.rank_of(**coordinates) == rank
        assert mesh.rank_of(**{axis: coordinates[axis] for axis in DENSE}) == rank
        assert mesh.rank_of(**{axis: coordinates[axis] for axis in EXPERT}) == rank


@given(mesh_sizes(max_ranks=64), st.sampled_from([DENSE, EXPERT]), st.data())
def test_a_group_is_the_ranks_that_agree_on_every_other_axis(sizes, grid, data):
    mesh = Mesh(num_ranks(sizes), **sizes)
    axes = data.draw(subsets(grid))
    others = [axis for axis in grid if axis not in axes]

    def fixed(rank):
        return [getattr(mesh.coordinates_of(rank), axis) for axis in others]

    for rank in range(num_ranks(sizes)):
        alike = tuple(r for r in range(num_ranks(sizes)) if fixed(r) == fixed(rank))
        assert mesh.group(rank, *axes) == alike
        assert mesh.group(rank, *reversed(axes)) == alike


@given(mesh_sizes(max_ranks=64))
def test_expert_groups_and_their_replicas_tile_the_dp_cp_group(sizes):
    mesh = Mesh(num_ranks(sizes), **sizes)
    for rank in range(num_ranks(sizes)):
        data_group = mesh.group(rank, "dp", "cp")
        block = data_group.index(rank) // sizes["ep"] * sizes["ep"]
        assert mesh.group(rank, "ep") == data_group[block : block + sizes["ep"]]
        assert mesh.group(rank, "edp") == data_group[data_group.index(rank) % sizes["ep"] :: sizes["ep"]]
        assert mesh.group(rank, "ep", "edp") == data_group


def test_a_mesh_of_two_by_two_by_two_by_two_reads_as_drawn():
    mesh = Mesh(16, pp=2, dp=2, cp=2, tp=2, ep=2)
    assert mesh.sizes == dict(pp=2, dp=2, cp=2, tp=2, ep=2, edp=2)
    assert mesh.group(0, "tp") == (0, 1)
    assert mesh.group(0, "cp") == (0, 2)
    assert mesh.group(0, "dp") == (0, 4)
    assert mesh.group(0, "pp") == (0, 8)
    assert mesh.group(13, "dp", "cp") == (9, 11, 13, 15)
    assert mesh.group(13, "ep") == (13, 15)
    assert mesh.group(13, "edp") == (9, 13)
    assert mesh.group(5) == (5,)


def test_a_mesh_of_10_to_the_12_ranks_needs_no_table_of_ranks():
    mesh = Mesh(10**12, pp=10, dp=10**9, cp=5, tp=20, ep=40)
    last = mesh.coordinates_of(10**12 - 1)
    assert last == (9, 10**9 - 1, 4, 19, 39, 5 * 10**9 // 40 - 1)
    assert mesh.rank_of(**last._asdict()) == 10**12 - 1
    assert mesh.group(10**12 - 1, "pp") == tuple(range(10**11 - 1, 10**12, 10**11))
    assert len(mesh.group(10**12 // 3, "ep", "tp")) == 800


def test_a_hundred_thousand_ranks_in_one_group_are_ascending():
    mesh = Mesh(98_304, pp=16, dp=96, cp=8, tp=8, ep=64)
    assert mesh.group(12_345, *DENSE) == tuple(range(98_304))
    assert len(mesh.group(12_345, "dp", "cp")) == 96 * 8


@given(mesh_sizes())
def test_all_ranks_make_the_same_groups_in_order_and_join_each(sizes):
    worlds = [FakeComm(rank, num_ranks(sizes)) for rank in range(num_ranks(sizes))]
    for world in worlds:
        Mesh(world, **sizes)
    for groups in zip(*(world.made for world in worlds)):
        assert len({name for name, _ in groups}) == 1
        members = {ranks for _, ranks in groups}
        # Each group is named alike by all its ranks, and together they are the world.
        assert sorted(r for ranks in members for r in ranks) == list(range(num_ranks(sizes)))
        assert all(rank in ranks for rank, (_, ranks) in enumerate(groups))


def test_a_product_of_axes_is_one_comm_in_any_order():
    world = FakeComm(5, 8)
    mesh = Mesh(world, dp=2, cp=2, tp=2)
    assert mesh.comm("dp", "cp") is mesh.comm("cp", "dp")
    assert mesh.coordinates == (0, 1, 0, 1, 0, 2)
    assert (mesh.comm("dp", "cp").rank, mesh.comm("dp", "cp").size) == (2, 4)
    made = len(world.made)
    mesh.comm("tp", "ep")  # in no list of ours: made now
    assert len(world.made) == made + 1
    assert mesh.comm().size == 1


@examples(2)
@given(st.lists(mesh_sizes(), min_size=3, max_size=3))
def test_several_meshes_gather_only_from_their_own_groups(meshes):
    """Each rank gives its world rank; several meshes live on one world at once, with every product of their axes."""
    asked = [axes for grid in (DENSE, EXPERT) for n in range(5) for axes in combinations(grid, n)]

    def gathered(world, meshes):
        mine = [sizes for sizes in meshes if world.rank < num_ranks(sizes)]
        built = [Mesh(world.subgroup(range(num_ranks(sizes)), "mesh"), **sizes) for sizes in mine]
        me = torch.tensor([world.rank])
        handles = [[mesh.comm(*axes).all_gather(me, async_op=True) for axes in asked] for mesh in built]
        return [[tuple(handle.wait().tolist()) for handle in row] for row in handles]

    for rank, answers in enumerate(run(gathered, meshes, world_size=8)):
        mine = [Mesh(num_ranks(sizes), **sizes) for sizes in meshes if rank < num_ranks(sizes)]
        assert answers == [[mesh.group(rank, *axes) for axes in asked] for mesh in mine]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            dict(pp=2, dp=2, tp=3),
            "pp=2 x dp=2 x cp=1 x tp=3 = 12 ranks, but the world has 8; use tp=2, or start 12 ranks",
        ),
        (dict(dp=2), "the world has 8; use pp=4, dp=8, cp=4 or tp=4, or start 2 ranks"),
        (dict(dp=3, tp=3), "no single axis would mend it: change two, or start 9 ranks"),
        (dict(dp=8, ep=3), "ep=3 does not divide dp*cp=8; use 1, 2, 4 or 8"),
        (dict(dp=8, tp=0), "tp=0; use a whole number of 1 or more"),
        (dict(dp=-8), "dp=-8; use"),
        (dict(dp=8, tp=True), "tp=True; use"),
        (dict(dp=8.0), "dp=8.0; use"),
        (dict(dp="8"), "dp='8'; use"),
    ],
)
def test_sizes_not_filling_the_world_are_refused_with_advice(sizes, message):
    with pytest.raises(ValueError) as refusal:
        Mesh(8, **sizes)
    assert message in str(refusal.value)


@pytest.mark.parametrize("world", [0, -1, True, None, "8", 2.0])
def test_a_world_must_be_a_comm_or_a_positive_whole_number(world):
    with pytest.raises(ValueError, match="world="):
        Mesh(world)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: m.comm("tp"), "number of ranks, 8"),
        (lambda m: m.coordinates, "number of ranks, 8"),
        (lambda m: m.group(0, "xp"), "'xp' is not of a mesh; use pp, dp"),
        (lambda m: m.group(0, "dp", "ep"), "mix two grids"),
        (lambda m: m.group(8, "dp"), "rank=8 is not in a world of 8"),
        (lambda m: m.coordinates_of(-1), "rank=-1"),
        (lambda m: m.rank_of(dp=4), "dp=4 is outside the mesh; use 0 to 3"),
        (lambda m: m.rank_of(dp=1, ep=0), "ep=0 disagrees"),
    ],
)
def test_what_a_mesh_cannot_answer_is_refused_with_the_numbers(ask, message):
    with pytest.raises(ValueError) as refusal:
        ask(Mesh(8, dp=4, tp=2, ep=2))
    assert message in str(refusal.value)
