"""Every schedule, by its name on the command line: minipar's own here, other schedules from extras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minipar.schedules.costs import Costs
from minipar.schedules.gpipe import breadth_first, gpipe
from minipar.schedules.one_f_one_b import interleaved, one_f_one_b
from minipar.schedules.schedule import Schedule
from minipar.schedules.search import zb_auto
from minipar.schedules.v_shaped import dualpipe_v, zb_v
from minipar.schedules.zero_bubble import zb_h1, zb_h2
from minipar.support.errors import one_of
from minipar.support.registry import Choice, Kind


class ScheduleChoice(Choice):
    """A schedule that a run can choose.

    build         build(p, m), or build(p, m, v) if `chunks` is None, returns the Schedule; `takes` names build's other
                  arguments, which have defaults; one that takes `slices` cuts samples into slices
    chunks        stages per rank; None: any number, 2 if not given
    v_shaped      each rank has two chunks, one on the way down and one on the way back up
    pipeline      "module:name" of the `Pipeline` that runs it
    """

    def __init__(
        self,
        build: Callable[..., Schedule],
        chunks: int | None = 1,
        *,
        v_shaped: bool = False,
        pipeline: str = "minipar.pipeline:Pipeline",
        takes: Sequence[str] = (),
        help: str = "",
        options: type | None = None,
    ):
        super().__init__(pipeline, help, options)
        self.build, self.chunks, self.v_shaped = build, chunks, v_shaped
        self.takes, self.sliced = tuple(takes), "slices" in takes

    def priced_as(self, config: Any) -> str:
        """Return the name of the schedule whose formulas predict this run."""
        return str(config.schedule)

    def arguments(self, config: Any) -> dict[str, Any]:
        """Return the arguments of `build` that a run's settings give."""
        options = config.options.get("schedule")
        return {} if options is None else vars(options)


def _search(p: int, m: int, costs: Costs | None = None, memory_limit: float | None = None) -> Schedule:
    return zb_auto(p, m, costs or Costs(), 2 * p if memory_limit is None else memory_limit)


SCHEDULES: Kind[ScheduleChoice] = Kind(
    "schedule",
    {
        "gpipe": ScheduleChoice(gpipe, help="all forwards, then all backwards"),
        "breadth-first": ScheduleChoice(
            breadth_first,
            None,
            help="gpipe with several chunks per rank, one chunk after another",
        ),
        "1f1b": ScheduleChoice(one_f_one_b, help="one forward, one backward"),
        "interleaved": ScheduleChoice(interleaved, None, help="1f1b with several chunks per rank"),
        "zb-h1": ScheduleChoice(zb_h1, help="zero bubble, with 1f1b's memory"),
        "zb-h2": ScheduleChoice(zb_h2, help="zero bubble, with twice the memory"),
        "zb-v": ScheduleChoice(zb_v, 2, v_shaped=True, help="zero bubble, stages placed in a V"),
        "dualpipe-v": ScheduleChoice(dualpipe_v, 2, v_shaped=True, help="DualPipe folded into a V"),
        "zb-auto": ScheduleChoice(
            _search,
            takes=("costs", "memory_limit"),
            help="a zero-bubble schedule found by search",
        ),
    },
)


# Schedules that are only drawn: no run can choose them. An extra provides one by an entry point "timeline.NAME".
DRAWN: Kind[ScheduleChoice] = Kind("timeline", {})


def find_schedule(name: str) -> ScheduleChoice:
    """Return the schedule of this name, for runs or only to be drawn. Raises ValueError for an unknown name."""
    return DRAWN[name] if name in DRAWN and name not in SCHEDULES else SCHEDULES[name]


def chunks_per_rank(name: str, v: int | None = None) -> int:
    """Return the number of stages per rank: the schedule's fixed number or, if it has none, v (2 if v is None).

    Raises ValueError for an unknown name, or a v other than the fixed number.
    """
    fixed = find_schedule(name).chunks
    if fixed is None:
        return 2 if v is None else v
    if v not in (None, fixed):
        free = [other for other, choice in SCHEDULES.own.items() if choice.chunks is None]
        raise ValueError(
            f"chunks={v} stages a rank with schedule={name!r}, which has {fixed}; use {one_of(free)}, or leave it out"
        )
    return fixed


def make_schedule(name: str, p: int, m: int, v: int | None = None, **arguments: Any) -> Schedule:
    """Return the schedule `name` for m microbatches on p ranks.

    v          chunks per rank, if the schedule leaves this number open; default: 2
    arguments  the schedule's own arguments, such as `slices`, or zb-auto's `costs` and `memory_limit`

    Raises ValueError for an unknown name, a v or an argument that the schedule does not have, or a size below 1.
    """
    choice = find_schedule(name)
    chunks = chunks_per_rank(name, v)
    for argument, value in arguments.items():
        if argument not in choice.takes:
            raise ValueError(f"{argument}={value!r} is no argument of schedule={name!r}; leave it out")
    sizes = (p, m) if choice.chunks is not None else (p, m, chunks)
    return choice.build(*sizes, **arguments)
