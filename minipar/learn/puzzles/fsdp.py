"""Puzzle 6: FSDP, which gathers a layer's weights, uses them, and frees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minipar.learn.puzzles.network import Call, Steps, World
from minipar.learn.puzzles.overlap import averaged, ring_seconds
from minipar.learn.puzzles.puzzle import Job, Limit, Puzzle
from minipar.learn.puzzles.values import Fault, Value, parts_of, same_rank

LAYERS = 6
WEIGHT_BYTES = 120_000_000  # for one layer
FORWARD_S, BACKWARD_S = 2e-3, 4e-3


def layers_of(world: World, rank: int) -> tuple[Value, Callable[..., Call], Callable[..., Call]]:
    """Return a rank's samples, and its functions `forward(layer, weights, x)` and `backward(layer, weights, dx)`."""
    p, memory = world.num_ranks, world.memories[rank]

    def activation(name: str) -> Value:
        return Value(memory, name, [(0, parts_of(f"rank {rank}"))], 0)

    def check(layer: int, weights: Any, x: Any, expected: str, what: str) -> None:
        if not isinstance(weights, Value) or not isinstance(x, Value):
            raise Fault(
                f"{what} of layer {layer} is given {weights!r} and {x!r}; it takes weights and {expected}"
            )
        same_rank(weights, x)
        if weights.of != f"weights of layer {layer}" or weights.indices != tuple(range(p)):
            raise Fault(f"{what} of layer {layer} needs its whole weights, and is given {weights!r}")
        if x.of != expected:
            raise Fault(f"{what} of layer {layer} needs the {expected}, and is given the {x.of}")

    def forward(layer: int, weights: Value, x: Value) -> Call:
        def steps() -> Steps:
            check(layer, weights, x, _activation(layer - 1), "the forward")
            yield from world.comms[rank].compute(FORWARD_S, ("F", layer)).__await__()
            return activation(_activation(layer))

        return Call(world, rank, "forward", steps)

    def backward(layer: int, weights: Value, dx: Value) -> Call:
        def steps() -> Steps:
            check(layer, weights, dx, _error(layer + 1), "the backward")
            yield from world.comms[rank].compute(BACKWARD_S, ("B", layer)).__await__()
            blocks = [(chunk, parts_of(f"rank {rank}")) for chunk in range(p)]
            gradient = Value(memory, f"gradient of layer {layer}", blocks, WEIGHT_BYTES // p)
            return activation(_error(layer)), gradient

        return Call(world, rank, "backward", steps)

    return activation(_activation(-1)), forward, backward


def _activation(layer: int) -> str:
    return "samples" if layer < 0 else f"output of layer {layer}"


def _error(layer: int) -> str:
    """Return the name of the gradient with respect to a layer's input.

    LAYERS stands for the input of the first backward, which is the last layer's output itself.
    """
    return _activation(LAYERS - 1) if layer == LAYERS else f"gradient by the input of layer {layer}"


def job(world: World) -> Job:
    """Return the inputs, expected results and limits for the ranks of this world."""
    p = world.num_ranks
    layer_share = (p - 1) / p * WEIGHT_BYTES
    gather_s = ring_seconds(world, WEIGHT_BYTES)
    compute_s = LAYERS * (FORWARD_S + BACKWARD_S)
    # On two ranks, the whole last gradient is freed before its shard exists, so the two are never held together.
    num_shards = 2 * LAYERS if p > 2 else 2 * LAYERS - 1
    held = (num_shards / p + 1) * WEIGHT_BYTES
    most = (2 * LAYERS / p + 3 + 3 / p) * WEIGHT_BYTES
    limit = Limit(
        most,
        held,
        "shards of weights and gradients, and one layer whole, as long as nothing is gathered ahead",
    )

    def inputs(rank: int) -> tuple[Any, ...]:
        shards = [
            Value(
                world.memories[rank],
                f"weights of layer {layer}",
                [(rank, parts_of("the weights"))],
                WEIGHT_BYTES // p,
            )
            for layer in range(LAYERS)
        ]
        x, forward, backward = layers_of(world, rank)
        return shards, x, forward, backward

    return Job(
        inputs=inputs,
        wanted=lambda rank: [averaged(world, layer, range(rank, rank + 1)) for layer in range(LAYERS)],
        sent=Limit(
            3 * LAYERS * layer_share,
            (3 * LAYERS - 1) * layer_share,
            "3 (p-1)/p of the weights, as the last layer's weights serve for both ways",
        ),
        seconds=Limit(
            compute_s + 3 * LAYERS * gather_s,
            compute_s + 2 * gather_s,
            "the computing, the first all-gather and the last reduce-scatter; all others hidden behind it",
        ),
        memory=(limit,) * p,
    )


FSDP = Puzzle(
    name="fsdp",
    title="FSDP: gather and free",
    minutes=20,
    lesson="03",
    task="""
The model is too large for one rank, so each has **one shard of every layer**. For the forward of a layer it gathers
the whole weights, and frees them after use; the backward, from the last layer to the first, gathers them again. Of
each gradient it keeps its shard of the average.

You may hold your shards, and three whole layers, gradients included: not all six. Return the list of averaged
gradient shards, layer 0 first. For the best time, gather the next layer while this one computes; that is not asked
for, and holds more.
""",
    given=f"There are {LAYERS} layers. The weights of one have n = {WEIGHT_BYTES // 10**6} MB, as has its gradient. A "
    f"forward takes {FORWARD_S * 1e3:g} ms, a backward {BACKWARD_S * 1e3:g} ms.",
    stub="""\
async def program(comm, shards, x, forward, backward):
    # weights = await comm.all_gather(shards[layer])         the layer's whole weights
    # x = await forward(layer, weights, x)                   layer 0 first
    # dx, gradient = await backward(layer, weights, dx)      the last layer first; it begins with the last x
    # mine = await comm.reduce_scatter(gradient)
    raise NotImplementedError
""",
    hints=(
        "Whole weights in one variable, not in a list: what a list refers to is held.",
        "The weights of the forward are gone when the backward comes; gather them again. That is the price: "
        "3 instead of 2 of (p-1)/p.",
        "After the loop, or before the next gather, `del weights, gradient` gives their memory back earlier.",
    ),
    answer="""\
async def program(comm, shards, x, forward, backward):
    layers = range(len(shards))
    for layer in layers:
        weights = await comm.all_gather(shards[layer])
        x = await forward(layer, weights, x)
        del weights
    gradients, dx = {}, x
    for layer in reversed(layers):
        weights = await comm.all_gather(shards[layer])
        dx, gradient = await backward(layer, weights, dx)
        del weights
        gradients[layer] = await comm.reduce_scatter(gradient) / comm.size
        del gradient
    return [gradients[layer] for layer in layers]
""",
    sizes=(4, 2),
    job=job,
)
