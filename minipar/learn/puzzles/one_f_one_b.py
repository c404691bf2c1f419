"""Puzzle 7: 1F1B, a pipeline with limited memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minipar.learn.puzzles.network import Call, Network, Steps, World
from minipar.learn.puzzles.puzzle import Job, Limit, Puzzle, Wanted
from minipar.learn.puzzles.values import Fault, Value, name_of, parts_of, same_rank

MICROBATCHES = 8
SAVED_BYTES = 160_000_000  # activations of one microbatch, kept from its forward to its backward
MESSAGE_BYTES = 2_000_000
GRADIENT_BYTES = 4_000_000
FORWARD_S, BACKWARD_S = 1e-3, 2e-3


def stage_of(world: World, rank: int) -> tuple[Callable[..., Call], Callable[..., Call]]:
    """Return a stage's functions `forward(x)` and `backward(saved, dy)`. Both raise Fault for values of other stages."""
    memory, last = world.memories[rank], world.num_ranks - 1

    def value(of: str, microbatch: int, num_bytes: int) -> Value:
        return Value(memory, of, [(0, parts_of(f"microbatch {microbatch}"))], num_bytes, (microbatch,))

    def forward(x: Any) -> Call:
        def steps() -> Steps:
            expected = "tokens" if rank == 0 else f"output of stage {rank - 1}"
            if not isinstance(x, Value) or x.of != expected:
                raise Fault(f"the forward of stage {rank} needs the {expected}, and is given {name_of(x)}")
            (microbatch,) = x.about
            yield from world.comms[rank].compute(FORWARD_S, ("F", microbatch)).__await__()
            output = value(f"output of stage {rank}", microbatch, MESSAGE_BYTES)
            return output, value(f"saved activations of stage {rank}", microbatch, SAVED_BYTES)

        return Call(world, rank, "forward", steps)

    def backward(saved: Any, dy: Any) -> Call:
        def steps() -> Steps:
            if not isinstance(saved, Value) or saved.of != f"saved activations of stage {rank}":
                raise Fault(
                    f"the backward of stage {rank} needs what its forward saved, and is given {name_of(saved)}"
                )
            (microbatch,) = saved.about
            if rank == last and dy is not None:
                raise Fault(
                    f"the backward of stage {rank} begins with its own loss, so its dy is None, not {name_of(dy)}"
                )
            if rank < last:
                expected = f"gradient from stage {rank + 1}"
                if not isinstance(dy, Value) or dy.of != expected:
                    raise Fault(
                        f"the backward of stage {rank} needs the {expected}, and is given {name_of(dy)}"
                    )
                same_rank(saved, dy)
                if dy.about != saved.about:
                    raise Fault(
                        f"the backward of stage {rank} gets the activations of microbatch {microbatch}, "
                        f"and the gradient of microbatch {dy.about[0]}"
                    )
            yield from world.comms[rank].compute(BACKWARD_S, ("B", microbatch)).__await__()
            dx = value(f"gradient from stage {rank}", microbatch, MESSAGE_BYTES)
            blocks = [(0, parts_of(f"microbatch {microbatch}"))]
            return dx, Value(memory, f"weight gradient of stage {rank}", blocks, GRADIENT_BYTES)

        return Call(world, rank, "backward", steps)

    return forward, backward


def job(world: World) -> Job:
    """Return the inputs, expected results and limits for the ranks of this world."""
    p = world.num_ranks
    seconds = (MICROBATCHES + p - 1) * (FORWARD_S + BACKWARD_S)
    sent = (2 if p > 2 else 1) * MICROBATCHES * MESSAGE_BYTES

    def inputs(rank: int) -> tuple[Any, ...]:
        memory = world.memories[rank]
        tokens = [
            Value(memory, "tokens", [(0, parts_of(f"microbatch {m}"))], 0, (m,)) for m in range(MICROBATCHES)
        ]
        return tokens, *stage_of(world, rank)

    def held(stage: int) -> Limit:
        activations = (p - stage) * SAVED_BYTES
        return Limit(
            activations + 4 * MESSAGE_BYTES + 2 * GRADIENT_BYTES,
            activations + MESSAGE_BYTES + GRADIENT_BYTES,
            f"{p - stage} times the saved activations, on stage {stage}, a message and the gradient",
        )

    whole = parts_of(*(f"microbatch {m}" for m in range(MICROBATCHES)))
    return Job(
        inputs=inputs,
        wanted=lambda rank: Wanted(f"weight gradient of stage {rank}", ((0, whole),)),
        sent=Limit(sent, sent, "an activation and a gradient of each microbatch"),
        seconds=Limit(seconds, seconds, "(m + p - 1) (forward + backward)"),
        memory=tuple(held(stage) for stage in range(p)),
    )


ONE_F_ONE_B = Puzzle(
    name="1f1b",
    title="1F1B within a limit of memory",
    minutes=30,
    lesson="06",
    task="""
Rank s is stage s of a pipeline: it gets a microbatch's activation from stage s - 1, computes, and hands its output
on. Backward goes the other way. From the forward of a microbatch until its backward, its `saved` activations occupy
memory.

All forwards first, then all backwards (GPipe) holds all m microbatches. Stage s may hold **p - s** of them, and a few
messages. And the pipeline must stay as fast: (m + p - 1) times a forward and a backward, so one microbatch after
another is too slow. Return the sum of this stage's weight gradients.
""",
    given=f"There are m = {MICROBATCHES} microbatches. A forward takes {FORWARD_S * 1e3:g} ms, a backward "
    f"{BACKWARD_S * 1e3:g} ms. `saved` is {SAVED_BYTES // 10**6} MB, an output {MESSAGE_BYTES // 10**6} MB.",
    stub="""\
async def program(comm, microbatches, forward, backward):
    # microbatches                               a list: the tokens of each, which only stage 0 may use
    # output, saved = await forward(x)           x: tokens, or the output of the stage before
    # dx, gradient = await backward(saved, dy)   dy: from the stage after; None on the last stage
    raise NotImplementedError
""",
    hints=(
        "Warm-up: stage s runs p - 1 - s forwards. Then one forward, one backward, in turns, until no forward is "
        "left; then the rest of the backwards.",
        "Keep `saved` in a dictionary by microbatch, and `pop` it for the backward; a variable that still "
        "refers to it holds it.",
        "Two inner functions help: one for receive-forward-send of microbatch m, one for receive-backward-send.",
    ),
    answer="""\
async def program(comm, microbatches, forward, backward):
    stage, last, count = comm.rank, comm.size - 1, len(microbatches)
    saved, gradients = {}, []

    async def run_forward(m):
        x = microbatches[m] if stage == 0 else await comm.recv(stage - 1)
        output, saved[m] = await forward(x)
        if stage < last:
            await comm.send(output, stage + 1)

    async def run_backward(m):
        dy = None if stage == last else await comm.recv(stage + 1)
        dx, gradient = await backward(saved.pop(m), dy)
        if stage > 0:
            await comm.send(dx, stage - 1)
        gradients[:] = [sum(gradients) + gradient]

    warmup = min(last - stage, count)
    for m in range(warmup):
        await run_forward(m)
    for m in range(count):
        if m + warmup < count:
            await run_forward(m + warmup)
        await run_backward(m)
    return gradients[0]
""",
    sizes=(4, 3, 2),
    job=job,
    network=lambda num_ranks: Network(alpha_s=0.0, beta_s=0.0),
)
