"""Pipeline schedules in closed form: layers of each stage, live activations of each rank, idle time.

`minipar.schedules.simulate` computes the same from a schedule's actions, in time proportional to their number; a planner
asks a hundred thousand times. The tests hold the two equal.
"""

from __future__ import annotations

from functools import cache

from minipar.schedules.registry import LOOPED, SLICED, V_SHAPED, chunks_per_rank

PLANNED = (
    "1f1b", "gpipe", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "zb-auto", "seq1f1b",
    "terapipe",
)  # fmt: skip
# The other schedules of `minipar train`, ways of tp and optimizers; and what to plan in their place.
UNPLANNED = {
    "chimera": "holds two copies of the model, and is no better than twice the dp of a V on half the pp; use zb-v there",
    "dualpipe": "holds two copies of the model, and is dualpipe-v with twice the dp on half the pp; use that",
    "hanayo": "has no closed form, and is not planned; use interleaved",
    "v-half": "has no closed form, and is not planned; use zb-v",
    "v-min": "has no closed form, and is not planned; use zb-v",
    **dict.fromkeys(("2d", "2.5d", "3d"), "is a grid of tp ranks, which is not planned; use tp alone"),
    **dict.fromkeys(("muon", "lamb"), "is not planned; leave it out: states are AdamW's"),
}


@cache
def stage_layers(num_layers: int, num_stages: int, head_layers: float = 0.0) -> tuple[int, ...]:
    """Return the number of layers of each stage, the slowest stage being as fast as possible.

    head_layers  the head's cost in layers: the last stage has it, so that it may get fewer layers

    All layers are taken to cost the same. Where cuts are equally good, later stages are longer, as in
    `minipar.pipeline.balance`.
    Raises ValueError where there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers for {num_stages} stages; use at most {num_layers} stages")
    if num_stages == 1:
        return (num_layers,)
    others = num_stages - 1
    sizes = range(1, num_layers - others + 1)
    slowest = {last: max(-(-(num_layers - last) // others), last + head_layers) for last in sizes}
    last = max(slowest, key=lambda n: (-slowest[n], n))
    each, more = divmod(num_layers - last, others)
    return (each,) * (others - more) + (each + 1,) * more + (last,)


def stages_of(schedule: str, rank: int, pp: int, chunks: int) -> tuple[int, ...]:
    """Return the stages that a pipeline rank holds: r, r + p, ... if looped; r and 2p - 1 - r if V-shaped."""
    if schedule in V_SHAPED:
        return rank, 2 * pp - 1 - rank
    return tuple(range(rank, pp * chunks, pp))


def live_chunks(schedule: str, rank: int, pp: int, m: int, chunks: int = 1, slices: int = 1) -> int:
    """Return the most activations, one per stage and microbatch or slice of one, that a rank holds at once.

    gpipe, breadth-first   m v
    terapipe               m s
    seq1f1b                min(p - r + s - 1, m s)
    1f1b                   min(p - r, m)
    interleaved            min(2 (p - r - 1) + (v - 1) p + 1, m v)
    zb-h1                  min(p, m)
    zb-h2                  min(2 p - 1, m)
    zb-auto                min(2 p, m): for equal costs and 2p activations, as `minipar train` has it
    zb-v                   min(2 p, 2 m): of half a rank's layers each
    dualpipe-v             min(2 p + 1, 2 m), likewise

    For m >= p; the simulator's peak_live.
    """
    if schedule in ("gpipe", "breadth-first"):
        return m * chunks
    if schedule == "1f1b" or (schedule == "interleaved" and chunks == 1):
        return min(pp - rank, m)
    if schedule == "interleaved":
        return min(2 * (pp - rank - 1) + (chunks - 1) * pp + 1, m * chunks)
    if schedule in SLICED:
        return m * slices if schedule == "terapipe" else min(pp - rank + slices - 1, m * slices)
    if schedule == "zb-h1":
        return min(pp, m)
    most = {"zb-h2": (2 * pp - 1, m), "zb-auto": (2 * pp, m), "zb-v": (2 * pp, 2 * m)}
    return min(most.get(schedule, (2 * pp + 1, 2 * m)))


def idle_s(schedule: str, pp: int, f: float, i: float, w: float, chunks: int = 1) -> float:
    """Return the seconds that a rank is idle in a step: f, i and w are those of a rank's stages for one microbatch.

    1f1b, gpipe                  (p-1) (F + I + W)
    seq1f1b, terapipe            the same, of one slice
    interleaved, breadth-first   (p-1) (F + I + W) / v
    zb-h1                        (p-1) (F + I - min(F, W))
    zb-h2, zb-auto               (p-1) (F + I - 2W), at least 0
    zb-v                         (p-1) (I - W), at least 0
    dualpipe-v                   (p-1) (F + I - W)/2 and, if that is above 0, ((p-2) (I - F) - (2F - I))/2

    For as many microbatches as `enough_microbatches` asks for, W at most F and I, and in a V F at most I.
    """
    whole = f + i + w
    if schedule == "dualpipe-v":
        return (pp - 1) * (f + i - w) / 2 + max(0.0, (pp - 2) * (i - f) - (2 * f - i)) / 2
    each = {
        "interleaved": whole / chunks,
        "breadth-first": whole / chunks,
        "zb-h1": f + i - min(f, w),
        "zb-h2": max(0.0, f + i - 2 * w),
        "zb-auto": max(0.0, f + i - 2 * w),
        "zb-v": max(0.0, i - w),
    }.get(schedule, whole)
    return (pp - 1) * each


def least_idle(schedule: str, pp: int, m: int, chunks: int, slices: int = 1) -> float:
    """Return a lower bound of the idle time over the work of an even share of the layers: none of what splits I and W."""
    if schedule not in (*LOOPED, *SLICED, "1f1b", "gpipe"):
        return 0.0
    return (pp - 1) / (m * chunks * slices)


def message_hops(schedule: str, pp: int, m: int, chunks: int = 1, slices: int = 1) -> float:
    """Return how many messages between stages, one after the other, lengthen a step: their latency times this.

    1f1b                  2 (p-1) (m/p + 1) - 2    after each p microbatches a rank waits for a round trip
    seq1f1b               2 (p-1) (((m-1) s + 1)/p + 1) - 2    after each p slices, but for the first sample's; to 1
    gpipe, zb-h2, zb-auto 2 (p-1)
    terapipe              2 (p-1)
    breadth-first         2 (p-1)                  the others of its hops lie behind other microbatches' work
    interleaved           2 (v p - 1)
    zb-h1, dualpipe-v     4 (p-1)
    zb-v                  6 (p-1) - 2

    Messages short beside a stage's work; equal stages; m a multiple of p, and for all but 1f1b at least 2p.
    """
    if pp == 1:
        return 0.0
    return {
        "1f1b": 2 * (pp - 1) * (m / pp + 1) - 2,
        "seq1f1b": 2 * (pp - 1) * (((m - 1) * slices + 1) / pp + 1) - 2,
        "interleaved": 2 * (chunks * pp - 1),
        "zb-h1": 4 * (pp - 1),
        "dualpipe-v": 4 * (pp - 1),
        "zb-v": 6 * (pp - 1) - 2,
    }.get(schedule, 2 * (pp - 1))


def enough_microbatches(schedule: str, pp: int, m: int) -> bool:
    """Return whether the closed forms hold: for all but 1f1b, gpipe and slices, enough microbatches to fill them."""
    if schedule in ("1f1b", "gpipe", *SLICED):
        return True
    if schedule in LOOPED:
        return m % pp == 0
    return m >= (2 * pp if schedule == "dualpipe-v" else 2 * pp - 1)


def chunk_choices(schedule: str, num_layers: int, pp: int) -> tuple[int, ...]:
    """Return the numbers of chunks per rank to consider: for looped schedules 2 and 4, as far as there are layers."""
    if pp == 1:
        return (1,) if schedule == "1f1b" else ()
    choices = (2, 4) if schedule in LOOPED else (chunks_per_rank(schedule),)
    return tuple(v for v in choices if v * pp <= num_layers)
