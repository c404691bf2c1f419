"""Pipeline schedules in closed form: layers of each stage, live activations of each rank, idle time.

`minipar.schedules.simulate` computes the same values from a schedule's actions, but takes time proportional to their
number, and the planner needs the values a hundred thousand times. Tests check that both are equal. This module has the
formulas of the library's own schedules; an extra's are not planned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from minipar.config.choices import OPTIMIZERS, TENSOR_LAYOUTS
from minipar.schedules.registry import SCHEDULES, chunks_per_rank
from minipar.support.errors import one_of


class RankContents(NamedTuple):
    """The contents that `num_ranks` pipeline ranks have in common; `rank` is the first of them.

    num_layers, num_moe  layers, and how many of them have experts
    first, last          whether the rank holds the first stage (the embedding) or the last stage (the head)
    """

    rank: int
    num_ranks: int
    num_layers: int
    num_moe: int
    first: bool
    last: bool


class ClosedForms(NamedTuple):
    """The formulas of a schedule, for p ranks, m microbatches and v chunks a rank.

    live    (rank, p, m, v) -> the maximum number of activations on a rank: one per stage and microbatch
    idle    (p, f, i, w, v) -> a rank's idle time in a step; f, i, w are its F, I, W of one microbatch
    fills   (p, m) -> whether m microbatches fill the pipeline, so that the formulas hold
    first   all forwards come first: the last stage holds all logits
    """

    live: Callable[[int, int, int, int], int]
    idle: Callable[[int, float, float, float, int], float]
    fills: Callable[[int, int], bool]
    first: bool = False


def _always(p: int, m: int) -> bool:
    return True


def _rounds(p: int, m: int) -> bool:
    return m % p == 0


def _twice(p: int, m: int) -> bool:
    return m >= 2 * p - 1


def _interleaved(r: int, p: int, m: int, v: int) -> int:
    return min(p - r, m) if v == 1 else min(2 * (p - r - 1) + (v - 1) * p + 1, m * v)


def _dualpipe_v(p: int, f: float, i: float, w: float, v: int) -> float:
    return (p - 1) * (f + i - w) / 2 + max(0.0, (p - 2) * (i - f) - (2 * f - i)) / 2


# The formulas stand in words at `live_chunks` and `idle_s`.
FORMS = {
    "1f1b": ClosedForms(lambda r, p, m, v: min(p - r, m), lambda p, f, i, w, v: (p - 1) * (f + i + w), _always),
    "gpipe": ClosedForms(
        lambda r, p, m, v: m * v, lambda p, f, i, w, v: (p - 1) * (f + i + w), _always, first=True
    ),
    "interleaved": ClosedForms(_interleaved, lambda p, f, i, w, v: (p - 1) * (f + i + w) / v, _rounds),
    "breadth-first": ClosedForms(
        lambda r, p, m, v: m * v, lambda p, f, i, w, v: (p - 1) * (f + i + w) / v, _rounds, first=True
    ),
    "zb-h1": ClosedForms(
        lambda r, p, m, v: min(p, m), lambda p, f, i, w, v: (p - 1) * (f + i - min(f, w)), _twice
    ),
    "zb-h2": ClosedForms(
        lambda r, p, m, v: min(2 * p - 1, m), lambda p, f, i, w, v: (p - 1) * max(0.0, f + i - 2 * w), _twice
    ),
    "zb-auto": ClosedForms(
        lambda r, p, m, v: min(2 * p, m), lambda p, f, i, w, v: (p - 1) * max(0.0, f + i - 2 * w), _twice
    ),
    "zb-v": ClosedForms(
        lambda r, p, m, v: min(2 * p, 2 * m), lambda p, f, i, w, v: (p - 1) * max(0.0, i - w), _twice
    ),
    "dualpipe-v": ClosedForms(
        lambda r, p, m, v: min(2 * p + 1, 2 * m), _dualpipe_v, lambda p, m: m >= 2 * p
    ),
}  # fmt: skip


def forms_of(schedule: str) -> ClosedForms:
    """Return the formulas of a schedule. Raises ValueError for a schedule that is unknown or not planned."""
    if schedule not in FORMS:
        raise ValueError(f"schedule={schedule} {NO_FORMS}")
    return FORMS[schedule]


NO_FORMS = f"has no closed form, and is not planned; use {one_of(FORMS)}"


def unplanned() -> dict[str, str]:
    """Return the schedules, layouts of tp and optimizers that cannot be planned: name -> why, or what to plan instead."""
    schedules = dict.fromkeys(SCHEDULES.extras(), NO_FORMS)
    layouts = dict.fromkeys(TENSOR_LAYOUTS.extras(), "is a layout of tp that is not planned; use tp alone")
    optimizers = dict.fromkeys(OPTIMIZERS.extras(), "is not planned; leave it out: states are AdamW's")
    return schedules | layouts | optimizers


@cache
def stage_layers(num_layers: int, num_stages: int, head_layers: float = 0.0) -> tuple[int, ...]:
    """Return the number of layers of each stage, so that the slowest stage is as fast as possible.

    head_layers  the head's cost in layers; the last stage also runs the head, so it may get fewer layers

    All layers are assumed to cost the same. Among equally good cuts, later stages get more layers, as in
    `minipar.pipeline.balance`.
    Raises ValueError if there are fewer layers than stages.
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
    """Return the stages of pipeline rank r: r, r + p, ... in a looped schedule; r and 2p - 1 - r in a V-shaped one."""
    if SCHEDULES[schedule].v_shaped:
        return rank, 2 * pp - 1 - rank
    return tuple(range(rank, pp * chunks, pp))


def live_chunks(schedule: str, rank: int, pp: int, m: int, chunks: int = 1) -> int:
    """Return the maximum number of activations that rank r of p holds, one per stage and microbatch.

    gpipe, breadth-first   m v
    1f1b                   min(p - r, m)
    interleaved            min(2 (p - r - 1) + (v - 1) p + 1, m v)
    zb-h1                  min(p, m)
    zb-h2                  min(2 p - 1, m)
    zb-auto                min(2 p, m) for equal costs and a limit of 2p activations, the default of `minipar train`
    zb-v                   min(2 p, 2 m), each of half a rank's layers
    dualpipe-v             min(2 p + 1, 2 m), each of half a rank's layers

    Valid for m >= p; equals the simulator's peak_live.
    """
    return forms_of(schedule).live(rank, pp, m, chunks)


def idle_s(schedule: str, pp: int, f: float, i: float, w: float, chunks: int = 1) -> float:
    """Return a rank's idle time in a step, by schedule; f, i, w are its F, I, W of one microbatch.

    1f1b, gpipe                  (p-1) (F + I + W)
    interleaved, breadth-first   (p-1) (F + I + W) / v
    zb-h1                        (p-1) (F + I - min(F, W))
    zb-h2, zb-auto               (p-1) (F + I - 2W), at least 0
    zb-v                         (p-1) (I - W), at least 0
    dualpipe-v                   (p-1) (F + I - W)/2 and, if that is above 0, ((p-2) (I - F) - (2F - I))/2

    Valid if `enough_microbatches` holds, W <= F and W <= I; for V-shaped schedules also F <= I.
    """
    return forms_of(schedule).idle(pp, f, i, w, chunks)


def enough_microbatches(schedule: str, pp: int, m: int) -> bool:
    """Return whether there are enough microbatches for the closed forms to hold: enough to fill the pipeline."""
    return forms_of(schedule).fills(pp, m)


def live_heads(schedule: str, m: int) -> int:
    """Return the maximum number of microbatches between forward and backward on the last stage.

    It is m if all forwards come first, else 1: the last stage then runs a backward right after its forward. All but the
    first of these backwards directly follow another one.
    """
    return m if forms_of(schedule).first else 1


def chunk_choices(schedule: str, num_layers: int, pp: int) -> tuple[int, ...]:
    """Return the numbers of chunks per rank to consider: for looped schedules 2 and 4, if there are enough layers."""
    if pp == 1:
        return (1,) if schedule == "1f1b" else ()
    choices = (2, 4) if SCHEDULES[schedule].chunks is None else (chunks_per_rank(schedule),)
    return tuple(v for v in choices if v * pp <= num_layers)
