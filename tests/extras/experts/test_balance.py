"""Experts move to where there is less load: the same numbers, the bytes of the move, and checkpoints of what has moved."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig
from minipar.extras.experts import moved_experts
from minipar.extras.experts.expert_balance import balanced, num_moved, rank_loads
from minipar.mesh import Mesh, Placement, gather, placement_of
from minipar.model.moe import moe_layers
from minipar.train.checkpoint.restore import Checkpoint
from minipar.train.checkpoint.saver import Saver
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from minipar.train.state import parts_of
from minipar.train.step import train_step
from minipar.train.verification.verify import table, verify

MODEL = replace(VERIFY_DEFAULTS.model, num_experts=8, top_k=2, capacity_factor=None, balance_coef=0.0)
RUN: TrainConfig = VERIFY_DEFAULTS.choosing(
    model=MODEL, dp=4, ep=4, steps=3, dispatch=("balance", {"every": 1})
)


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_swaps_lower_the_load_of_the_busiest_until_none_does(ep, each, data):
    n = ep * each
    loads = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    before = tuple(data.draw(st.permutations(range(n))))
    after = balanced(loads, before, ep)
    assert sorted(after) == list(range(n))
    ranks, busiest = rank_loads(loads, after, ep), max(rank_loads(loads, after, ep))
    assert busiest <= max(rank_loads(loads, before, ep))
    assert balanced(loads, after, ep) == after
    first = ranks.index(busiest)
    for i, e in enumerate(after):
        for j, f in enumerate(after):
            if i // each == first != j // each:
                pair = busiest - loads[e] + loads[f], ranks[j // each] - loads[f] + loads[e]
                assert max(pair) >= busiest, (e, f)


def test_equal_loads_are_reached_where_they_can_be():
    assert rank_loads([9, 7, 2, 0], (0, 1, 2, 3), 2) == [16, 2]
    after = balanced([9, 7, 2, 0], (0, 1, 2, 3), 2)
    assert rank_loads([9, 7, 2, 0], after, 2) == [9, 9]
    assert num_moved((0, 1, 2, 3), after, 2) == [1, 1]
    assert balanced([1, 1, 1, 1], (3, 1, 2, 0), 2) == (3, 1, 2, 0)  # nothing is moved for nothing


def moved(world, config):
    """Per step and layer: (rows per expert, placement before, after, bytes sent over ep, bytes formula, rows held)."""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    ep, move, seen = state.mesh.comm("ep"), moved_experts.move_experts, []

    def watched(comm, moe, dispatch, experts, optimizer):
        before, sent = dispatch.experts, ep.traffic.sent_bytes
        move(comm, moe, dispatch, experts, optimizer)
        leaving = num_moved(before, experts, ep.size)[ep.rank]
        weights = 3 * MODEL.dim * MODEL.hidden_dim // config.tp
        sent = ep.traffic.sent_bytes - sent
        rows = placement_of(moe.experts.gate).rows
        seen.append((before, dispatch.experts, sent, leaving * weights * BYTES[config.dtype], rows))

    with patch.object(moved_experts, "move_experts", watched):
        for step in range(config.steps):
            train_step(world, state, config, load_text(None), step)
    return ep.rank, seen


BYTES = {"float64": 3 * 8, "bfloat16": 2 + 3 * 4}  # a weight, with Adam's two states, and a master copy


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "mesh", [dict(), dict(dp=2, ep=2, tp=2, zero=2), dict(dp=2, ep=2, zero=3, dtype="bfloat16")], ids=str
)
def test_what_moves_is_sent_once_with_its_state(mesh):
    """With FSDP the shards are the masters, so that nothing in bfloat16 is sent."""
    config = RUN.choosing(**mesh)
    each, times = MODEL.num_experts // config.ep, 12 / 14 if config.dtype == "bfloat16" else 1
    for rank, seen in minipar.run(moved, config, world_size=config.world_size):
        assert any(before != after for before, after, *_ in seen), "nothing moved in three steps"
        for before, after, sent, formula, rows in seen:
            assert sent == formula * times
            if before != after:
                assert rows == after[rank * each : (rank + 1) * each]


MESHES = [
    dict(),
    dict(dp=4, ep=2),
    dict(dp=2, ep=2, tp=2, zero=3, sequence_parallel=True),
    dict(dp=2, ep=2, zero=1, optimizer="lamb"),
    dict(dp=2, ep=2, pp=2, microbatches=2, schedule="zb-h1", zero=2, recompute="full"),
    dict(dp=2, ep=2, dtype="bfloat16"),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_mesh_whose_experts_move_gives_the_numbers_of_one_process(mesh):
    result = verify(RUN.choosing(**mesh))
    assert result.equal, table(result)


def diverges(world, config, fault):
    """How far the weights after three steps are from those without experts that move."""
    states_stay = lambda moe, optimizer: (right(moe, optimizer)[0], [])  # noqa: E731
    right, replaced = moved_experts._tensors_of, {"states stay": states_stay}
    found = []
    for options in ({"every": 1}, {"every": 99}):
        chosen = config.choosing(dispatch=("balance", options))
        state = parallelize(chosen, Mesh(world, **config.mesh_sizes), world.device)
        with patch.object(moved_experts, "_tensors_of", replaced.get(fault, right)):
            for step in range(config.steps):
                train_step(world, state, chosen, load_text(None), step)
        found.append([(placement_of(x), x.detach()) for x in state.optimizer.tensors])
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", ["none", "states stay"])
def test_state_that_is_left_behind_is_seen(fault):
    parts = minipar.run(diverges, RUN, fault, world_size=4)
    one, other = (
        {name: gather([pair for rank in parts for pair in rank[i] if pair[0].name == name]) for name in names}
        for i in (0, 1)
        for names in [{place.name for place, _ in parts[0][i]}]
    )
    apart = max(float((one[name] - other[name]).abs().max()) for name in one)
    assert (apart < 1e-9) == (fault == "none")


def saved(world, config, folder):
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    for step in range(config.steps):
        train_step(world, state, config, load_text(None), step)
    parts, numbers = parts_of(state)
    Saver(world, folder, wait=True).save(3, parts, {}, numbers)
    experts = [
        dispatch.experts for _, moe in moe_layers(state.stages[0]) for dispatch in [moe.overrides.dispatch]
    ]
    return [part._replace(tensor=part.tensor.detach().clone()) for part in parts], experts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [dict(), dict(dp=2, ep=2, zero=3)], ids=str)
def test_a_checkpoint_of_moved_experts_is_read_on_any_mesh(mesh, tmp_path):
    config = RUN.choosing(**mesh)
    of_ranks = minipar.run(saved, config, tmp_path, world_size=config.world_size)
    assert any(experts != tuple(range(8)) for experts in of_ranks[0][1])
    (path,) = tmp_path.glob("step-*")
    checkpoint = Checkpoint(path)
    for kind in ("parameter", "exp_avg"):
        name = "layers.1.mlp.experts.down"
        want = gather(
            [
                (p.placement, p.tensor)
                for parts, _ in of_ranks
                for p in parts
                if (p.kind, p.placement.name) == (kind, name)
            ]
        )
        whole = Placement.whole(name, want.shape)
        for wanted in (whole, whole.shard(0, 1, 2), whole.shard(1, 0, 2).flatten_range(5, 300)):
            assert torch.equal(checkpoint.read(kind, wanted), wanted.slice_of(want))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(dp=4, ep=2, zero=1), "zero=1 divides each expert's state over its 2 replicas"),
        (dict(ep=1), "ep=1 leaves no other rank"),
        (dict(compress="int8"), "compress=int8 keeps state of its own"),
        (dict(zero=1, offload="cpu"), "offload=cpu keeps states elsewhere"),
        (dict(dispatch=("balance", {"every": 0})), "dispatch.every=0 is out of range"),
    ],
)  # fmt: skip
def test_what_cannot_move_is_refused(options, why):
    with pytest.raises(ValueError, match=why):
        RUN.choosing(**options)
