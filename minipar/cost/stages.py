"""Pipeline schedules in closed form: layers of each stage, live activations of each rank, idle time.

`minipar.schedules.simulate` computes the same values from a schedule's actions, but takes time proportional to their
number, and the planner needs the values a hundred thousand times. Tests check that both are equal. This module has the
formulas of the library's own schedules; an extra names those of its schedules in `ScheduleChoice.closed_forms`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, cast

from minipar.config.choices import OPTIMIZERS, TENSOR_LAYOUTS
from minipar.schedules.registry import SCHEDULES, chunks_per_rank
from minipar.support.errors import one_of


class LiveActivations(NamedTuple):
    """The activations that a rank holds at the worst moment.

    kept           bytes, from forward to backward
    recomputed     bytes of the layers that are recomputed together
    logits_tokens  tokens whose logits the last stage holds
    """

    kept: float
    recomputed: float
    logits_tokens: float


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


class ClosedForms:
    """The formulas of the library's own schedules; each method takes the schedule's name.

    An extra has a subclass for its schedules, which overrides what differs, as for samples that are cut into slices.

    pp      number of pipeline ranks        chunks  chunks per rank
    m       number of microbatches          slices  slices per sample; 1 if the schedule does not cut samples
    job, layout  a Job and a Layout of `layout.py`, which imports this module
    """

    def live_chunks(self, schedule: str, rank: int, pp: int, m: int, chunks: int, slices: int) -> int:
        """Return the maximum number of live activations on rank r of p, with v chunks per rank, by schedule.

        An activation is that of a stage for a microbatch, or for a slice.

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
        if schedule in ("gpipe", "breadth-first"):
            return m * chunks
        if schedule == "1f1b" or (schedule == "interleaved" and chunks == 1):
            return min(pp - rank, m)
        if schedule == "interleaved":
            return min(2 * (pp - rank - 1) + (chunks - 1) * pp + 1, m * chunks)
        if schedule == "zb-h1":
            return min(pp, m)
        most = {"zb-h2": (2 * pp - 1, m), "zb-auto": (2 * pp, m), "zb-v": (2 * pp, 2 * m)}
        return min(most.get(schedule, (2 * pp + 1, 2 * m)))

    def idle_s(self, schedule: str, pp: int, f: float, i: float, w: float, chunks: int) -> float:
        """Return a rank's idle time in a step, by schedule; f, i, w are its F, I, W of one microbatch (or average slice).

        1f1b, gpipe                  (p-1) (F + I + W)
        interleaved, breadth-first   (p-1) (F + I + W) / v
        zb-h1                        (p-1) (F + I - min(F, W))
        zb-h2, zb-auto               (p-1) (F + I - 2W), at least 0
        zb-v                         (p-1) (I - W), at least 0
        dualpipe-v                   (p-1) (F + I - W)/2 and, if that is above 0, ((p-2) (I - F) - (2F - I))/2

        Valid if `enough_microbatches` holds, W <= F and W <= I; for V-shaped schedules also F <= I.
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

    def least_idle(self, schedule: str, pp: int, m: int, chunks: int, slices: int) -> float:
        """Return a lower bound on the idle time, as a fraction of the time of an even share of the layers.

        It is (p-1)/(m v), and 0 for schedules that split the backward into I and W.
        """
        if schedule not in ("1f1b", "gpipe", "interleaved", "breadth-first"):
            return 0.0
        return (pp - 1) / (m * chunks)

    def message_hops(self, schedule: str, pp: int, m: int, chunks: int, slices: int) -> float:
        """Return how many messages between stages are on the critical path of a step, by schedule:

        1f1b                  2 (p-1) (m/p + 1) - 2    after every p microbatches a rank waits for a round trip
        gpipe, zb-h2, zb-auto 2 (p-1)
        breadth-first         2 (p-1)                  the other hops overlap with work on other microbatches
        interleaved           2 (v p - 1)
        zb-h1, dualpipe-v     4 (p-1)
        zb-v                  6 (p-1) - 2

        Valid if messages take little time compared with a stage's work, stages are equal, and m is a multiple of p: 2p or
        more, but for 1f1b also p.
        """
        return {
            "1f1b": 2 * (pp - 1) * (m / pp + 1) - 2,
            "interleaved": 2 * (chunks * pp - 1),
            "zb-h1": 4 * (pp - 1),
            "dualpipe-v": 4 * (pp - 1),
            "zb-v": 6 * (pp - 1) - 2,
        }.get(schedule, 2 * (pp - 1))

    def enough_microbatches(self, schedule: str, pp: int, m: int) -> bool:
        """Return whether these formulas hold for m microbatches.

        That is if they fill the pipeline; always for 1f1b and gpipe, which need not be full.
        """
        if schedule in ("1f1b", "gpipe"):
            return True
        if schedule in ("interleaved", "breadth-first"):
            return m % pp == 0
        return m >= (2 * pp if schedule == "dualpipe-v" else 2 * pp - 1)

    def live_heads(self, schedule: str, m: int, slices: int) -> int:
        """Return the maximum number of microbatches (or slices) between forward and backward on the last stage.

        It is m for gpipe and breadth-first, else 1: the last stage then runs a backward right after its forward.
        """
        return m if schedule in ("gpipe", "breadth-first") else 1

    def why_illegal(self, job: Any, layout: Any) -> str | None:
        """Return in one line why samples cannot be cut into the layout's slices; None if they can."""
        if layout.slices > 1:
            return f"slices={layout.slices} needs a schedule of slices, not {layout.schedule}"
        return None

    def slice_choices(self, job: Any, layout: Any) -> tuple[int, ...]:
        """Return the numbers of slices to search for this layout; its own `slices` is ignored."""
        return (1,)

    def largest_slice(self, job: Any, layout: Any) -> int:
        """Return the tokens of the longest slice of a sample on one rank."""
        return int(job.seq_len // layout.cp)

    def largest_share(self, job: Any, layout: Any) -> float:
        """Return the cost of the most expensive slice, divided by the mean cost."""
        return 1.0

    def activations(self, job: Any, layout: Any, held: RankContents) -> LiveActivations | None:
        """Return the live activations of a rank with contents `held`; None: `live_chunks` counts whole microbatches."""
        return None


OWN_FORMS = ClosedForms()


@cache
def forms_of(schedule: str) -> ClosedForms:
    """Import and return the formulas of a schedule. Raises ValueError for a schedule that is unknown or not planned."""
    if schedule in SCHEDULES.own:
        return OWN_FORMS
    place = SCHEDULES[schedule].closed_forms
    if not place:
        raise ValueError(f"schedule={schedule} {_no_forms()}")
    module, _, name = place.partition(":")
    return cast(ClosedForms, getattr(import_module(module), name))


def planned() -> tuple[str, ...]:
    """Return the schedules that have closed forms: the library's own, and those of the installed extras."""
    return tuple(name for name, c in SCHEDULES.usable().items() if name in SCHEDULES.own or c.closed_forms)


def _no_forms() -> str:
    return f"has no closed form, and is not planned; use {one_of(planned())}"


def unplanned() -> dict[str, str]:
    """Return the schedules, layouts of tp and optimizers that cannot be planned: name -> why, or what to plan instead."""
    schedules = {name: _no_forms() for name in SCHEDULES.usable() if name not in planned()}
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


def live_chunks(schedule: str, rank: int, pp: int, m: int, chunks: int = 1, slices: int = 1) -> int:
    """Return the maximum number of activations that a rank holds, counting one per stage and microbatch (or slice)."""
    return forms_of(schedule).live_chunks(schedule, rank, pp, m, chunks, slices)


def idle_s(schedule: str, pp: int, f: float, i: float, w: float, chunks: int = 1) -> float:
    """Return the time that a rank is idle in a step; f, i, w are the times of its F, I, W for one microbatch."""
    return forms_of(schedule).idle_s(schedule, pp, f, i, w, chunks)


def least_idle(schedule: str, pp: int, m: int, chunks: int, slices: int = 1) -> float:
    """Return a lower bound on the idle time, as a fraction of the time of an even share of the layers."""
    return forms_of(schedule).least_idle(schedule, pp, m, chunks, slices)


def message_hops(schedule: str, pp: int, m: int, chunks: int = 1, slices: int = 1) -> float:
    """Return how many messages between stages are on the critical path of a step; 0 without a pipeline."""
    return forms_of(schedule).message_hops(schedule, pp, m, chunks, slices) if pp > 1 else 0.0


def enough_microbatches(schedule: str, pp: int, m: int) -> bool:
    """Return whether there are enough microbatches for the closed forms to hold: enough to fill the pipeline."""
    return forms_of(schedule).enough_microbatches(schedule, pp, m)


def live_heads(schedule: str, m: int, slices: int = 1) -> int:
    """Return the maximum number of microbatches (or slices) between forward and backward on the last stage.

    All but the first of their backwards directly follow another backward of the stage, not a forward.
    """
    return forms_of(schedule).live_heads(schedule, m, slices)


def chunk_choices(schedule: str, num_layers: int, pp: int) -> tuple[int, ...]:
    """Return the numbers of chunks per rank to consider: for looped schedules 2 and 4, if there are enough layers."""
    if pp == 1:
        return (1,) if schedule == "1f1b" else ()
    choices = (2, 4) if SCHEDULES[schedule].chunks is None else (chunks_per_rank(schedule),)
    return tuple(v for v in choices if v * pp <= num_layers)
