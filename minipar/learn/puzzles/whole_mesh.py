"""Puzzle 10: data, pipeline and tensor parallelism on one mesh."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from minipar.learn.puzzles.network import Call, Network, Steps, World
from minipar.learn.puzzles.puzzle import Job, Limit, Puzzle, Wanted
from minipar.learn.puzzles.values import Fault, Parts, Value, missing_parts, name_of, parts_of

ACTIVATION_BYTES, GRADIENT_BYTES = 24_000_000, 120_000_000
FORWARD_S, BACKWARD_S = 2e-3, 4e-3


class Sizes(NamedTuple):
    """The sizes of the axes, or a rank's coordinates along them."""

    pp: int
    dp: int
    tp: int


MESHES = {8: Sizes(2, 2, 2), 12: Sizes(2, 3, 2)}


def place_of(rank: int, sizes: Sizes) -> Sizes:
    """Return the coordinates of a rank: tp varies fastest, pp slowest."""
    return Sizes(rank // (sizes.dp * sizes.tp), rank // sizes.tp % sizes.dp, rank % sizes.tp)


def stage_of(world: World, rank: int, sizes: Sizes) -> tuple[Any, Any]:
    """Return the functions `forward(x)` and `backward(dy)` of a rank's shard of a stage.

    The outputs and the input gradients that they return are partial sums over tp.
    """
    at, memory, last = place_of(rank, sizes), world.memories[rank], sizes.pp - 1
    everything = {f"tensor shard {t}" for t in range(sizes.tp)}

    def value(of: str, part: str, num_bytes: int, about: tuple[int, ...]) -> Value:
        blocks = [(i, parts_of(part)) for i in range(world.num_ranks)]
        return Value(memory, of, blocks, num_bytes // world.num_ranks, about)

    def check(x: Any, expected: str, what: str) -> None:
        if not isinstance(x, Value) or x.of != expected:
            raise Fault(
                f"the {what} on rank {rank}, stage {at.pp}, needs the {expected}, and is given {name_of(x)}"
            )
        if x.about != (at.dp,):
            raise Fault(
                f"the {what} on rank {rank} is of replica {at.dp}, and is given a value of replica {x.about[0]}"
            )
        for _, parts in x.blocks:
            missing = sorted(everything - set(parts)) if expected != "tokens" else []
            if missing:
                raise Fault(
                    f"the {expected} that rank {rank} is given is a partial sum: {missing_parts(missing)} missing"
                )
            if any(count != 1 for count in parts.values()):
                raise Fault(f"the {expected} that rank {rank} is given has a part more than once")

    def forward(x: Any) -> Call:
        def steps() -> Steps:
            check(x, "tokens" if at.pp == 0 else f"output of stage {at.pp - 1}", "forward")
            yield from world.comms[rank].compute(FORWARD_S, ("F", at.dp)).__await__()
            return value(f"output of stage {at.pp}", f"tensor shard {at.tp}", ACTIVATION_BYTES, (at.dp,))

        return Call(world, rank, "forward", steps)

    def backward(dy: Any) -> Call:
        def steps() -> Steps:
            after = f"output of stage {at.pp}" if at.pp == last else f"gradient from stage {at.pp + 1}"
            check(dy, after, "backward")
            yield from world.comms[rank].compute(BACKWARD_S, ("B", at.dp)).__await__()
            dx = value(f"gradient from stage {at.pp}", f"tensor shard {at.tp}", ACTIVATION_BYTES, (at.dp,))
            return dx, value(_gradient(at), f"replica {at.dp}", GRADIENT_BYTES, ())

        return Call(world, rank, "backward", steps)

    return forward, backward


def _gradient(at: Sizes) -> str:
    return f"gradient of shard {at.tp} of stage {at.pp}"


def job(world: World) -> Job:
    """Return the inputs, expected results and limits for the ranks of this world."""
    sizes = MESHES[world.num_ranks]
    reduce_share, average_share = 2 * (sizes.tp - 1) / sizes.tp, 2 * (sizes.dp - 1) / sizes.dp
    sent = (2 * reduce_share + 1) * ACTIVATION_BYTES + average_share * GRADIENT_BYTES
    # The next rank along tp is on the same node; the next ranks along dp and pp are not.
    reduce_s = 2 * (sizes.tp - 1) * world.network.seconds(ACTIVATION_BYTES // sizes.tp, 0, 1)
    average_s = 2 * (sizes.dp - 1) * world.network.seconds(GRADIENT_BYTES // sizes.dp, 0, sizes.tp)
    hop_s = world.network.seconds(ACTIVATION_BYTES, 0, sizes.tp)
    way_s = sizes.pp * (FORWARD_S + BACKWARD_S) + 2 * (sizes.pp - 1) * hop_s + (2 * sizes.pp - 1) * reduce_s
    average: Parts = {f"replica {d}": Fraction(1, sizes.dp) for d in range(sizes.dp)}

    def inputs(rank: int) -> tuple[Any, ...]:
        at = place_of(rank, sizes)
        tokens = Value(world.memories[rank], "tokens", [(0, parts_of("tokens"))], 0, (at.dp,))
        return *sizes, tokens, *stage_of(world, rank, sizes)

    def wanted(rank: int) -> Wanted:
        return Wanted(_gradient(place_of(rank, sizes)), tuple((i, average) for i in range(world.num_ranks)))

    return Job(
        inputs=inputs,
        wanted=wanted,
        sent=Limit(sent, sent, "two all-reduces over tp, one activation on, one all-reduce over dp"),
        seconds=Limit(
            way_s + reduce_s + average_s,
            way_s + average_s,
            "the way forward and back, all-reduces over tp on it, and the gradients' over dp",
        ),
    )


WHOLE_MESH = Puzzle(
    name="mesh",
    title="A mesh",
    minutes=30,
    lesson="10",
    task="""
Everything together: `pp x dp x tp` ranks. Tensor parallel ranks are neighbours, on one node; stages are furthest
apart:

`rank = (stage * dp + replica) * tp + shard`

The `y` of a forward and the `dx` of a backward are **partial sums**, one shard's part in each: they need an all-reduce
over the ranks of the same stage and replica. Then `y` goes to the same shard of the same replica on the next stage, and
`dx` to that on the stage before. The weights of a shard are its own, so its `gradient` is no partial sum: it is averaged
over the replicas, the ranks of the same stage and shard. Return that average.
""",
    given=f"A forward takes {FORWARD_S * 1e3:g} ms, a backward {BACKWARD_S * 1e3:g} ms. `y` and `dx` have "
    f"{ACTIVATION_BYTES // 10**6} MB, `gradient` {GRADIENT_BYTES // 10**6} MB. "
    "pp x dp x tp is 2 x 2 x 2, and then 2 x 3 x 2.",
    stub="""\
async def program(comm, pp, dp, tp, tokens, forward, backward):
    # y = await forward(x)                        x: tokens on stage 0, else the output of the stage before
    # dx, gradient = await backward(dy)           dy: the whole output on the last stage, else what comes back
    # await comm.all_reduce(value, ranks)         a sum over these ranks only
    stage, replica, shard = comm.rank // (dp * tp), comm.rank // tp % dp, comm.rank % tp
    raise NotImplementedError
""",
    hints=(
        "The tp group: tp neighbours, beginning with `comm.rank - shard`. The dp group: ranks of this stage, "
        "`tp` apart.",
        "The next stage is `dp * tp` ranks further on.",
        "Sum dx over tp before it is sent back; on stage 0 nobody wants it.",
    ),
    answer="""\
async def program(comm, pp, dp, tp, tokens, forward, backward):
    stage, replica, shard = comm.rank // (dp * tp), comm.rank // tp % dp, comm.rank % tp
    tp_group = [comm.rank - shard + t for t in range(tp)]
    dp_group = [(stage * dp + d) * tp + shard for d in range(dp)]
    before, after = comm.rank - dp * tp, comm.rank + dp * tp

    x = tokens if stage == 0 else await comm.recv(before)
    output = await comm.all_reduce(await forward(x), tp_group)
    if stage < pp - 1:
        await comm.send(output, after)
        output = await comm.recv(after)
    dx, gradient = await backward(output)
    if stage > 0:
        await comm.send(await comm.all_reduce(dx, tp_group), before)
    return await comm.all_reduce(gradient, dp_group) / dp
""",
    sizes=(8, 12),
    job=job,
    network=lambda num_ranks: Network(node_size=MESHES[num_ranks].tp, node_speedup=8),
)
