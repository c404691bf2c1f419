"""Every schedule, by its name on the command line."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Literal

from minipar.errors import one_of
from minipar.schedules.building_block import v_half, v_min
from minipar.schedules.costs import Costs
from minipar.schedules.gpipe import breadth_first, gpipe
from minipar.schedules.one_f_one_b import interleaved, one_f_one_b
from minipar.schedules.schedule import Schedule
from minipar.schedules.search import zb_auto
from minipar.schedules.sequence_slices import seq1f1b, terapipe
from minipar.schedules.two_directions import chimera, dualpipe
from minipar.schedules.v_shaped import dualpipe_v, zb_v
from minipar.schedules.waves import hanayo
from minipar.schedules.zero_bubble import zb_h1, zb_h2

ScheduleName = Literal[
    "gpipe",
    "breadth-first",
    "1f1b",
    "interleaved",
    "hanayo",
    "terapipe",
    "seq1f1b",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
    "chimera",
    "dualpipe",
    "zb-auto",
]

# The looped schedules take (p, m, v), zb-auto takes (p, m, costs, memory_limit), the sliced ones (p, m, slices), all
# others (p, m).
SCHEDULES: MappingProxyType[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "breadth-first": breadth_first,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "hanayo": hanayo,
        "terapipe": terapipe,
        "seq1f1b": seq1f1b,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
        "v-half": v_half,
        "v-min": v_min,
        "dualpipe-v": dualpipe_v,
        "chimera": chimera,
        "dualpipe": dualpipe,
        "zb-auto": zb_auto,
    }
)
LOOPED = ("breadth-first", "interleaved", "hanayo")
SLICED = ("terapipe", "seq1f1b")
V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
TWO_DIRECTIONS = (
    "chimera",
    "dualpipe",
)  # ranks and microbatches must be even, and every rank holds twice the parameters


def chunks_per_rank(name: str, v: int | None = None) -> int:
    """Return into how many stages per rank the model is cut: v for breadth-first, interleaved and hanayo (default 2).

    Fixed for all others: two for the V-shaped, else one. In two directions a rank has one of each copy of the model.

    Raises ValueError for an unknown name, or a v other than the fixed number.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} is unknown; use {one_of(SCHEDULES, near=name)}")
    if name in LOOPED:
        return 2 if v is None else v
    fixed = 2 if name in V_SHAPED else 1
    if v not in (None, fixed):
        raise ValueError(
            f"v={v} chunks a rank with schedule={name!r}, which has {fixed}; use {one_of(LOOPED)}"
        )
    return fixed


def make_schedule(
    name: str,
    p: int,
    m: int,
    v: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    slices: int = 1,
) -> Schedule:
    """Return the schedule `name` for m microbatches on p ranks.

    v                    chunks per rank, for breadth-first, interleaved and hanayo; default: 2
    costs, memory_limit  arguments of zb-auto's search; default: equal costs and 2p activations
    slices               of every sample's tokens, for terapipe and seq1f1b

    Raises ValueError for an unknown name, a v or slices that the schedule does not have, a size below 1, or an odd one in
    two directions.
    """
    chunks = chunks_per_rank(name, v)
    if name in SLICED:
        return SCHEDULES[name](p, m, slices)
    if slices != 1:
        raise ValueError(
            f"slices={slices} of a sample with schedule={name!r}, which runs samples whole; use {one_of(SLICED)}"
        )
    if name in LOOPED:
        return SCHEDULES[name](p, m, chunks)
    if name == "zb-auto":
        return zb_auto(p, m, costs or Costs(), 2 * p if memory_limit is None else memory_limit)
    return SCHEDULES[name](p, m)
