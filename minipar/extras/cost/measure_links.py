"""Measure the speed between every pair of ranks, and find the widest ring."""

from __future__ import annotations

import time

import torch

from minipar.comm import Comm
from minipar.extras.cost.read_topology import from_pairs
from minipar.extras.cost.rings import ring_width, wide_ring
from minipar.extras.cost.topology import Topology
from minipar.runtime.launch import init_from_env, run
from minipar.support.environment import under_torchrun

Matrix = list[list[float]]  # [i][j] is the bytes per second from rank i to rank j; 0 if i = j


def measure_pairs(world: Comm, num_bytes: int, repeats: int) -> Matrix:
    """Measure the speed between each pair of ranks, in each direction, one pair at a time; every rank gets the matrix.

    A measurement lasts from sending a message of `num_bytes` to receiving the answer of one byte; the shortest of `repeats`
    counts. To each other rank, a rank sends `repeats` messages of `num_bytes`, and as many answers. There is a barrier
    before each of the p (p-1) pairs, and at the end an all-reduce of 8 p^2 bytes.
    """
    speeds = torch.zeros(world.size, world.size, dtype=torch.float64, device=world.device)
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
    for source in range(world.size):
        for to in range(world.size):
            if source == to:
                continue
            world.barrier()
            if world.rank == source:
                speeds[source, to] = num_bytes / min(_answered_s(world, message, to) for _ in range(repeats))
            elif world.rank == to:
                for _ in range(repeats):
                    received = world.recv(message.shape, message.dtype, source)
                    world.send(received[:1].contiguous(), source)
    matrix: Matrix = world.all_reduce(speeds).tolist()
    return matrix


def _answered_s(world: Comm, message: torch.Tensor, to: int) -> float:
    start_s = time.perf_counter()
    world.send(message, to)
    world.recv((1,), message.dtype, to).item()  # `item` makes the host wait for the GPU
    return max(time.perf_counter() - start_s, 1e-9)


def measured(num_ranks: int | None, num_bytes: int, repeats: int) -> Matrix | None:
    """Measure the ranks of torchrun, or else `num_ranks` local ranks. Under torchrun, only rank 0 gets the matrix."""
    if under_torchrun():
        world = init_from_env()
        matrix = measure_pairs(world, num_bytes, repeats)
        return None if world.rank else matrix
    found: Matrix = run(measure_pairs, num_bytes, repeats, world_size=num_ranks or 2, backend="auto")[0]
    return found


def pair_table(matrix: Matrix) -> list[str]:
    """Return the lines of a table of speeds in GB/s, from each row's rank to each column's rank."""
    head = "GB/s  " + "".join(f"{f'to {rank}':>9}" for rank in range(len(matrix)))
    rows = [
        f"from {i:<3}"
        + "".join(f"{'-' if i == j else f'{speed / 1e9:.3g}':>9}" for j, speed in enumerate(row))
        for i, row in enumerate(matrix)
    ]
    return [head, *rows]


def ring_lines(topology: Topology) -> list[str]:
    """Return lines that compare a wide ring with the ring in rank order, and show how to make a Comm of the wide ring."""
    found, in_order = wide_ring(topology), ring_width(topology, tuple(range(topology.num_ranks)))
    ranks = ", ".join(map(str, found.ranks))
    return [
        f"ring in rank order    {in_order / 1e9:.3g} GB/s",
        f"widest ring found     {found.width / 1e9:.3g} GB/s: {ranks}",
        f'in that order         world.subgroup({found.ranks}, "wide ring")',
    ]


def links_of_matrix(matrix: Matrix) -> list[str]:
    """Return the lines that describe measured pairs: the table of speeds and the rings."""
    return [*pair_table(matrix), *ring_lines(from_pairs(matrix))]
