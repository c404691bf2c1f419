"""Where the ranks of a node are known, "auto" goes in two levels: one order of additions, few bytes between nodes."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.comm import Comm, collectives
from minipar.comm.collectives import SHORT_BYTES_PER_RANK
from minipar.config.train_config import SMALL, TrainConfig
from minipar.mesh import Mesh
from minipar.spec.algorithms import recording_peers
from minipar.support.chunks import chunk_sizes
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from minipar.train.reference import train_in_one_process
from minipar.train.step import train_step
from tests.comm.cases import cases, failures
from tests.data_parallel.test_defaults import bits
from tests.examples import examples
from tests.strategies import seeds

FLOAT = 4
NODES = [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4)]  # ranks, ranks per node
THREE = ("all_reduce", "reduce_scatter", "all_gather")
sizes_and_nodes = st.sampled_from(NODES)


def on_nodes(world, node_size: int | None) -> Comm:
    """The same ranks, on nodes of so many."""
    return Comm.from_process_group(world.process_group(), node_size=node_size)


@examples(8)
@given(sizes_and_nodes, st.data())
def test_auto_on_nodes_gives_the_result_computed_in_one_process(nodes, data):
    size, node_size = nodes
    names = [(collective, name) for collective in THREE for name in ("auto", "hierarchical")]
    drawn = data.draw(st.lists(cases(size, names), min_size=8, max_size=12))

    def wrong(world):
        return failures(on_nodes(world, node_size), drawn)

    assert not any(minipar.run(wrong, world_size=size))


def bits_of_both(world, node_size, lengths, op, seed) -> list[bool]:
    """Whether this rank's chunk of a reduce-scatter is that of the all-reduce, to the last bit."""
    world, equal = on_nodes(world, node_size), []
    for n in lengths:
        x = torch.randn(n, generator=torch.Generator().manual_seed(seed + world.rank))
        whole, own = world.all_reduce(x, op), world.reduce_scatter(x, op)
        equal.append(torch.equal(own, whole.split(chunk_sizes(n, world.size))[world.rank]))
    return equal


@given(sizes_and_nodes, st.lists(st.integers(0, 4000), min_size=1, max_size=4), seeds)
@examples(10)
def test_on_nodes_a_reduce_scatter_adds_in_the_order_of_an_all_reduce(nodes, lengths, seed):
    for op in ("sum", "mean"):
        for equal in minipar.run(bits_of_both, nodes[1], lengths, op, seed, world_size=nodes[0]):
            assert all(equal)


def by_blocks(comm, x, op="sum", out=None, node_size=None):
    """A fault: a sum in two levels whose nodes cut the vector into g blocks, not into the places' chunks of all nodes."""
    node, across = comm.levels
    sizes = chunk_sizes(x.numel(), node.size)
    own = node.reduce_scatter(x.reshape(-1), op, sizes, algorithm="ring")
    own = across.all_reduce(own, op, algorithm="ring")
    return node.all_gather(own, sizes, algorithm="ring", out=out).view(x.shape)


@contextmanager
def blocks_of_the_node():
    with mock.patch.dict(collectives.ALGORITHMS["all_reduce"], hierarchical=by_blocks):
        yield


def test_a_two_level_all_reduce_in_another_order_is_noticed():
    def faulty(world):
        with blocks_of_the_node():
            return bits_of_both(world, 2, [4000], "sum", 0)

    def right(world):
        with blocks_of_the_node():
            return failures(on_nodes(world, 2), [])

    assert not any(minipar.run(right, world_size=6))
    assert not all(map(all, minipar.run(faulty, world_size=6)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("size", "node_size"), [(4, 2), (6, 2), (8, 4)])
@pytest.mark.parametrize(("stage", "reduce"), [(1, "mean"), (2, "sum")])
def test_on_nodes_zeros_sums_are_ddps_bit_for_bit(size, node_size, stage, reduce):
    def equal(world):
        return bits(on_nodes(world, node_size), (1, 64, 128), stage, reduce, "auto")

    assert all(map(all, minipar.run(equal, world_size=size)))


TRAINED = {
    "ddp": dict(dp=4),
    "zero 2": dict(dp=4, zero=2),
    "zero 3, tp beside it": dict(dp=4, tp=2, zero=3),
    "tp over nodes": dict(tp=4, sequence_parallel=True),
}


def trained(world, node_size: int, config: TrainConfig) -> tuple[list[float], set[str]]:
    """Losses, and the axes that went in two levels."""
    mesh = Mesh(on_nodes(world, node_size), **config.mesh_sizes)
    state, text = parallelize(config, mesh, world.device), load_text(None)
    losses = [train_step(mesh.world, state, config, text, step)["loss"] for step in range(config.steps)]
    levels = {axis: mesh.comm(*axis.split(".")).levels for axis in ("dp.cp", "tp")}
    return losses, {axis for axis, two in levels.items() if two and two.across.traffic.messages}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRAINED)
def test_on_nodes_training_gives_the_losses_of_one_process(name):
    sizes = TRAINED[name]
    config = TrainConfig(
        model=SMALL, **sizes, steps=2, batch_size=4, seq_len=32, dtype="float64", timeout_s=30
    )
    one = train_in_one_process(replace(config, dp=1, tp=1, zero=0), load_text(None), config.steps).losses
    size = config.world_size
    for losses, axes in minipar.run(trained, size // 2, config, world_size=size, timeout_s=30):
        assert losses == pytest.approx(one, rel=1e-10)
        assert axes == {"dp.cp" if config.dp > 1 else "tp"}


# Bytes --------------------------------------------------------------------------------------------------------------


def leaving(world, node_size: int, chunk: int, algorithm: str) -> list[tuple[int, int]]:
    """(bytes sent to other nodes, all bytes sent) by each of the three, of `chunk` elements a rank."""
    comm, counts = on_nodes(world, node_size), []
    x = torch.zeros(chunk * comm.size)
    for collective, argument in zip(THREE, (x, x, x[:chunk])):
        with recording_peers(comm) as sent:
            getattr(comm, collective)(argument, algorithm=algorithm)
        outside = sum(n for peer, n in sent.items() if peer // node_size != comm.rank // node_size)
        counts.append((outside, sum(sent.values())))
    return counts


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("size", "node_size"), NODES)
@pytest.mark.parametrize("chunk", [SHORT_BYTES_PER_RANK // FLOAT, 1 << 12])
def test_two_levels_send_a_gth_of_halvings_bytes_between_nodes(size, node_size, chunk):
    n, nodes = size * chunk * FLOAT, size // node_size
    whole, out = (size - 1) * n // size, (nodes - 1) * n // nodes
    once = (out // node_size, whole)
    twice = (2 * once[0], 2 * once[1])
    found = minipar.run(leaving, node_size, chunk, "auto", world_size=size)
    assert found == [[twice, once, once]] * size
    ring = minipar.run(leaving, node_size, chunk, "ring", world_size=size)
    assert max(rank[0] for rank in ring) == (2 * whole, 2 * whole)  # at the edge of a node
    if size & (size - 1) == 0:
        halving = minipar.run(leaving, node_size, chunk, "halving_doubling", world_size=size)
        assert halving == [[(2 * out, 2 * whole), (out, whole), (out, whole)]] * size


# The choice ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("node_size", "two"), [(None, False), (1, False), (2, True), (3, False), (4, False)])
def test_auto_uses_two_levels_only_on_several_multi_rank_nodes(node_size, two):
    def chosen(world):
        comm = on_nodes(world, node_size)
        with mock.patch.object(collectives, "choose", return_value="ring") as choose:
            comm.all_reduce(torch.zeros(100))
        named = collectives.choose("all_reduce", comm.size, 400, **choose.call_args.kwargs)
        return comm.levels is not None, named

    assert minipar.run(chosen, world_size=4) == [(two, "hierarchical" if two else "halving_doubling")] * 4


@pytest.mark.parametrize("size", [4, 6, 8])
def test_short_vectors_and_other_collectives_stay_as_they_are(size):
    for collective in collectives.ALGORITHMS:
        flat = {
            n: collectives.choose(collective, size, n) for n in (0, SHORT_BYTES_PER_RANK * size - 1, 1 << 24)
        }
        levels = {n: collectives.choose(collective, size, n, two_levels=True) for n in flat}
        changed = {n for n in flat if flat[n] != levels[n]}
        assert changed == ({1 << 24} if collective in THREE else set())


def test_an_algorithm_that_a_comm_carries_comes_before_the_two_levels():
    def sent(world):
        comm = on_nodes(world, 2).using("ring")
        comm.all_reduce(torch.zeros(100))
        return dict(comm.traffic.by_kind)

    assert minipar.run(sent, world_size=4) == [{"all_reduce": 600}] * 4
