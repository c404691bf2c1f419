"""Which axes cross from node to node, as every group looked at says; and the price of it, as the ledgers count."""

import warnings
from itertools import product

import pytest
import torch

import minipar
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh, axes_across_nodes
from minipar.train.data.text import load_text
from minipar.train.node_warning import leaving_bytes, sent_bytes, warn_if_tp_crosses
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step

MODEL = ModelConfig(dim=32, num_layers=2, num_heads=4, max_seq_len=16)


def config(model=MODEL, **changes) -> TrainConfig:
    return TrainConfig(**dict(model=model, batch_size=8, seq_len=16, bucket_mb=25) | changes)


def test_an_axis_crosses_where_one_of_its_groups_is_on_two_nodes():
    for pp, dp, cp, tp, ep in product((1, 2), (1, 2, 3), (1, 2), (1, 2, 3), (1, 2, 3)):
        if dp * cp % ep:
            continue
        mesh = Mesh(pp * dp * cp * tp, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
        groups = {axis: {mesh.group(rank, axis) for rank in range(mesh.world_size)} for axis in mesh.sizes}
        for n in range(1, mesh.world_size + 2):
            nodes = {axis: [{rank // n for rank in group} for group in groups[axis]] for axis in groups}
            want = {axis: any(len(of_group) > 1 for of_group in nodes[axis]) for axis in groups}
            assert axes_across_nodes(dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep), n) == want


def test_a_node_without_ranks_is_refused():
    with pytest.raises(ValueError, match="ranks_per_node=0"):
        axes_across_nodes(dict(tp=2), 0)


WITH_EXPERTS = ModelConfig(
    dim=32, num_layers=2, num_heads=4, max_seq_len=16, num_experts=2, group_tokens=16, capacity_factor=None
)
PARALLEL = ModelConfig(**vars(MODEL) | dict(parallel_block=True))
LATENT = ModelConfig(**vars(MODEL) | dict(num_kv_heads=4, kv_latent_dim=16, rope_dim=4))
PRICED = {
    "plain": config(dp=2, tp=2),
    "microbatches": config(dp=2, tp=2, microbatches=2),
    "float64": config(dp=2, tp=2, dtype="float64"),
    "sequence parallel": config(dp=2, tp=2, sequence_parallel=True, microbatches=2),
    "recompute": config(dp=2, tp=2, recompute="full"),
    "recompute, sequence parallel": config(tp=4, recompute="full", sequence_parallel=True),
    "recompute, dropout": config(ModelConfig(**vars(MODEL) | dict(dropout=0.1)), tp=4, recompute="full"),
    "in units": config(dp=2, tp=2, recompute="every:2"),
    "in units, sequence parallel": config(tp=4, recompute="every:2", sequence_parallel=True),
    "selective": config(tp=4, recompute="selective"),
    "context": config(cp=2, tp=2),
    "experts": config(WITH_EXPERTS, dp=2, tp=2),
    "parallel block": config(PARALLEL, dp=2, tp=2),
    "parallel block, in units, sequence parallel": config(
        PARALLEL, tp=4, recompute="every:2", sequence_parallel=True
    ),
    "latent attention": config(LATENT, dp=2, tp=2),
    "latent attention, in units, sequence parallel": config(
        LATENT, tp=4, recompute="every:2", sequence_parallel=True
    ),
    "data alone": config(dp=4),
}


def ledgers(world, priced: list[TrainConfig]) -> list[tuple[int, int]]:
    """Bytes this rank sends in a step over tp, and to sum gradients."""
    torch.set_num_threads(1)
    text, counts = load_text(None), []
    for number, one in enumerate(priced):
        mesh = Mesh(world.subgroup(range(world.size), f"run {number}"), **one.mesh_sizes)
        replica = parallelize(one, mesh, world.device)
        comms = mesh.comm("tp"), mesh.comm("dp", "cp"), mesh.comm("edp")
        before = [comm.traffic.sent_bytes for comm in comms]
        train_step(mesh.world, replica, one, text, 0)
        over_tp, dense, experts = (comm.traffic.sent_bytes - n for comm, n in zip(comms, before))
        counts.append((over_tp, dense + experts))
    return counts


@pytest.mark.thorough
def test_the_price_is_what_a_training_step_sends():
    for counts in minipar.run(ledgers, list(PRICED.values()), world_size=4):
        for (name, one), (over_tp, over_data) in zip(PRICED.items(), counts):
            sent = sent_bytes(one, one.mesh_sizes)
            assert over_tp == sent["tp"], name
            assert over_data == pytest.approx(sent["dp"] + sent["edp"], rel=0.02), name


def test_bytes_leaving_nodes_follow_each_groups_node_layout():
    sizes = dict(dp=2, tp=4)
    one = config(**sizes)
    sent = sent_bytes(one, sizes)
    # Four nodes of two; on each two ranks of a group of four on two nodes: (2-1)/(4-1) of what either sends.
    assert leaving_bytes(one, sizes, 2)[0] == pytest.approx(2 * sent["tp"] / 3)
    # Three nodes of three: ranks 0 to 3 are a ring with two edges between nodes, 4 to 7 are two on each of two nodes.
    assert leaving_bytes(one, sizes, 3)[0] == pytest.approx((2 + 4 / 3) * sent["tp"] / 3)
    assert leaving_bytes(one, sizes, 4)[0] == 0
    assert leaving_bytes(one, sizes, 4) == (0, 4 * sent["dp"])  # four pairs, a node each
    assert leaving_bytes(one, sizes, 8) == (0, 0)


def sent_across_nodes(world, one: TrainConfig, node_size: int) -> int:
    """Bytes that this rank sends to other nodes over tp, in a step."""
    nodes = Comm.from_process_group(world.process_group(), node_size=node_size)
    mesh = Mesh(nodes, **one.mesh_sizes)
    state = parallelize(one, mesh, world.device)
    before = mesh.comm("tp").levels.across.traffic.sent_bytes
    train_step(nodes, state, one, load_text(None), 0)
    return mesh.comm("tp").levels.across.traffic.sent_bytes - before


@pytest.mark.parametrize("one", [config(tp=4), config(tp=4, sequence_parallel=True)], ids=["plain", "tokens"])
def test_the_bytes_that_leave_a_node_are_those_of_a_training_step(one):
    sent = minipar.run(sent_across_nodes, one, 2, world_size=4)
    assert sum(sent) / 2 == pytest.approx(leaving_bytes(one, one.mesh_sizes, 2)[0], rel=1e-3)


def test_tp_across_nodes_is_warned_of_with_both_meshes_prices():
    one = config(dp=2, tp=4)
    inside = leaving_bytes(one, dict(dp=4, tp=2), 2)
    assert inside[0] == 0
    prices = [f"{n / 1e6:.2g} MB" for n in (*leaving_bytes(one, one.mesh_sizes, 2), inside[1])]
    with pytest.warns(UserWarning, match="tp=4 does not divide ranks_per_node=2") as caught:
        warn_if_tp_crosses(one, 2)
    said = str(caught[0].message)
    assert "with tp=2 and dp=4" in said
    assert all(price in said for price in prices)


def test_without_a_price_there_is_no_warning():
    grid = config(dp=2, tp=4, tp_layout="2d")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_tp_crosses(grid, 2)


@pytest.mark.parametrize("ranks_per_node", [4, 8, 16, 64])
def test_tp_inside_nodes_is_not_warned_of(ranks_per_node):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_tp_crosses(config(dp=2, tp=4), ranks_per_node)
