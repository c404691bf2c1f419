"""Puzzle 5: ZeRO-2, in which a rank keeps only the shard of each gradient whose weights it updates."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from minipar.learn.puzzles.network import World
from minipar.learn.puzzles.overlap import BACKWARD_S, GRADIENT_BYTES, LAYERS, backward_of, ring_seconds
from minipar.learn.puzzles.puzzle import Job, Limit, Puzzle, Wanted
from minipar.learn.puzzles.values import Fault, Value, name_of, parts_of, same_rank

OLD = "the old weights"


def weights(world: World, rank: int, layer: int) -> Value:
    """Return a layer's unsharded weights, which are as large as its gradient."""
    p = world.num_ranks
    blocks = [(chunk, parts_of(OLD)) for chunk in range(p)]
    return Value(world.memories[rank], f"weights of layer {layer}", blocks, GRADIENT_BYTES // p)


def step(old: Value, gradient: Value) -> Value:
    """Return updated weights. Raises Fault if `gradient` is not the gradient of exactly these weights."""
    if not isinstance(old, Value) or not isinstance(gradient, Value):
        raise Fault(
            f"step is given {name_of(old)} and {name_of(gradient)}; it takes weights and their gradient"
        )
    same_rank(old, gradient)
    if old.of.replace("weights", "gradient") != gradient.of or old.indices != gradient.indices:
        raise Fault(f"step updates {old} by {gradient}, which is not their gradient")
    blocks = [(index, mine | theirs) for (index, mine), (_, theirs) in zip(old.blocks, gradient.blocks)]
    return Value(old._memory, old.of, blocks, old.block_bytes)


def updated(world: World, layer: int) -> Wanted:
    """Return a layer's expected weights after the update."""
    p = world.num_ranks
    parts = parts_of(OLD) | {f"rank {rank}": Fraction(1, p) for rank in range(p)}
    return Wanted(f"weights of layer {layer}", tuple((chunk, parts) for chunk in range(p)))


def job(world: World) -> Job:
    """Return the inputs, expected results and limits for the ranks of this world."""
    p = world.num_ranks
    sent = LAYERS * 2 * (p - 1) / p * GRADIENT_BYTES
    whole_s = LAYERS * (BACKWARD_S + 2 * ring_seconds(world, GRADIENT_BYTES))
    best_s = LAYERS * BACKWARD_S + 2 * ring_seconds(world, GRADIENT_BYTES)
    # On two ranks, a whole gradient is freed before its shard exists, so the two are never held together.
    held = (LAYERS + 1 + (1 / p if p > 2 else 0)) * GRADIENT_BYTES
    most = (LAYERS + 2 + 3 / p) * GRADIENT_BYTES
    limit = Limit(most, held, "all weights, and one gradient, if each layer is updated at once")

    def inputs(rank: int) -> tuple[list[Value], Callable[..., object], Callable[..., object]]:
        return [weights(world, rank, layer) for layer in range(LAYERS)], backward_of(world, rank), step

    return Job(
        inputs=inputs,
        wanted=lambda rank: [updated(world, layer) for layer in range(LAYERS)],
        sent=Limit(sent, sent, "2 (p-1)/p of the weights: a reduce-scatter and an all-gather"),
        seconds=Limit(
            whole_s,
            best_s,
            "the backward, and the first layer's reduce-scatter and all-gather; all others hidden behind it",
        ),
        memory=(limit,) * p,
    )


ZERO2 = Puzzle(
    name="zero2",
    title="ZeRO-2: a shard of every gradient",
    minutes=20,
    lesson="03",
    task="""
With ZeRO, rank r updates only chunk r of each layer's weights. So it needs only **chunk r of each averaged
gradient**, and never has to keep a whole one for longer than the backward of a layer. After the update, the ranks
give each other their new chunks.

Memory counts: what your variables refer to is held, and `del` frees it. A chunk from `chunks()` is a view and keeps
the whole alive, as in torch. You may hold all weights, two whole layers more, and three chunks: not the gradients of
all four. Messages need not be hidden behind the backward. Return the new weights, a list with layer 0 first.
""",
    given=f"There are {LAYERS} layers. The weights of one have n = {GRADIENT_BYTES // 10**6} MB, as has its gradient; "
    f"its backward takes {BACKWARD_S * 1e3:g} ms.",
    stub="""\
async def program(comm, weights, backward, step):
    # weights                                         a list: each layer's weights, whole
    # gradient = await backward(layer)                the last layer first
    # mine = await comm.reduce_scatter(value)         chunk number comm.rank of the sum
    # whole = await comm.all_gather(chunk)            the chunks of all ranks, joined
    # new = step(weights_chunk, gradient_chunk)       the optimizer, for a chunk or for all
    raise NotImplementedError
""",
    hints=(
        "In the loop of the backward: a reduce-scatter, and only its result is kept. The next layer's gradient, "
        "in the same variable, frees this one.",
        "An all-reduce would send twice as much for gradients, of which all but one chunk is thrown away.",
        "`weights[layer].chunks(comm.size)[comm.rank]` is what this rank updates, by its shard divided by "
        "the number of ranks.",
    ),
    answer="""\
async def program(comm, weights, backward, step):
    shards = {}
    for layer in reversed(range(len(weights))):
        gradient = await backward(layer)
        shards[layer] = await comm.reduce_scatter(gradient)
    del gradient
    for layer in range(len(weights)):
        mine = weights[layer].chunks(comm.size)[comm.rank]
        new = step(mine, shards.pop(layer) / comm.size)
        del mine
        weights[layer] = await comm.all_gather(new)
    return weights
""",
    sizes=(4, 2),
    job=job,
)
