"""Puzzle 4: overlap the averaging of gradients with the backward."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from minipar.learn.puzzles.network import Call, Steps, World
from minipar.learn.puzzles.puzzle import Job, Limit, Puzzle, Wanted
from minipar.learn.puzzles.values import Fault, Value, parts_of

LAYERS = 4
GRADIENT_BYTES = 120_000_000  # for one layer
BACKWARD_S = 4e-3  # for one layer


def ring_seconds(world: World, num_bytes: int) -> float:
    """Return the time, in seconds, of an all-gather or a reduce-scatter whose unsharded vector has `num_bytes`."""
    p = world.num_ranks
    return (p - 1) * world.network.seconds(num_bytes // p, 0, 1)


def backward_of(world: World, rank: int) -> Callable[[int], Call]:
    """Return `backward(layer)`, which computes a layer's gradient. It must be called from the last layer to the first."""
    after = LAYERS

    def backward(layer: int) -> Call:
        def steps() -> Steps:
            nonlocal after
            if layer != after - 1:
                known = "the last layer" if after == LAYERS else f"layer {after}"
                raise Fault(
                    f"rank {rank} runs the backward of layer {layer!r} after {known}; it goes from layer {LAYERS - 1} to 0"
                )
            after = layer
            yield from world.comms[rank].compute(BACKWARD_S, ("B", layer)).__await__()
            p = world.num_ranks
            blocks = [(chunk, parts_of(f"rank {rank}")) for chunk in range(p)]
            return Value(world.memories[rank], f"gradient of layer {layer}", blocks, GRADIENT_BYTES // p)

        return Call(world, rank, "backward", steps)

    return backward


def averaged(world: World, layer: int, chunks: range) -> Wanted:
    """Return the expected chunks of a layer's gradient, averaged over all ranks."""
    p = world.num_ranks
    everybody = {f"rank {rank}": Fraction(1, p) for rank in range(p)}
    return Wanted(f"gradient of layer {layer}", tuple((chunk, everybody) for chunk in chunks))


def job(world: World) -> Job:
    """Return the inputs, expected results and limits for the ranks of this world."""
    p = world.num_ranks
    sent = LAYERS * 2 * (p - 1) / p * GRADIENT_BYTES
    seconds = LAYERS * BACKWARD_S + 2 * ring_seconds(world, GRADIENT_BYTES)
    return Job(
        inputs=lambda rank: (LAYERS, backward_of(world, rank)),
        wanted=lambda rank: [averaged(world, layer, range(p)) for layer in range(LAYERS)],
        sent=Limit(sent, sent, "2 (p-1)/p of each layer's gradient"),
        seconds=Limit(seconds, seconds, "the whole backward, and the all-reduce of one layer"),
    )


OVERLAP = Puzzle(
    name="overlap",
    title="Average gradients while the backward runs",
    minutes=10,
    lesson="02",
    task="""
Data parallelism: each rank runs the backward on its own samples, layer by layer **from the last to the first**, and
every gradient must become the average over all ranks. A gradient is ready long before the backward is over, so its
all-reduce can run while the next layer computes. Only the first layer's, which is ready last, has nothing to hide
behind: the backward and that one all-reduce are all the time you have.

`comm.all_reduce(value)` comes ready-made from here on: it is your ring. Return the list of averaged gradients, layer
0 first.
""",
    given=f"There are {LAYERS} layers. The gradient of one has n = {GRADIENT_BYTES // 10**6} MB, and its backward takes "
    f"{BACKWARD_S * 1e3:g} ms.",
    stub="""\
async def program(comm, num_layers, backward):
    # gradient = await backward(layer)               computes; the last layer first
    # total = await comm.all_reduce(value)           the sum over all ranks
    # handle = comm.start(comm.all_reduce(value))    the same, in the background
    # total = await handle                           waits for it
    # value / comm.size                              divides
    raise NotImplementedError
""",
    hints=(
        "`await comm.all_reduce(gradient)` in the loop stops the backward until the sum is there.",
        "Start each all-reduce in the loop, and collect the handles; await them after the loop.",
        "The handles are in the order of the backward. The list that you return begins with layer 0.",
    ),
    answer="""\
async def program(comm, num_layers, backward):
    handles = {}
    for layer in reversed(range(num_layers)):
        gradient = await backward(layer)
        handles[layer] = comm.start(comm.all_reduce(gradient))
    return [await handles[layer] / comm.size for layer in range(num_layers)]
""",
    sizes=(4, 2),
    job=job,
)
