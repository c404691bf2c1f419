"""The choices of `--schedule` that these modules add. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from minipar.extras.schedules.building_block import v_min
from minipar.extras.schedules.offloaded import offloaded
from minipar.extras.schedules.optimal import optimal
from minipar.extras.schedules.sequence_slices import seq1f1b
from minipar.extras.schedules.slicing import check_slices, slice_sizes
from minipar.extras.schedules.two_directions import chimera, dualpipe
from minipar.schedules.costs import Costs
from minipar.schedules.registry import ScheduleChoice
from minipar.schedules.schedule import Schedule
from minipar.schedules.search import zb_auto
from minipar.support.options import option


@dataclass(frozen=True)
class SliceOptions:
    """The options of a schedule that cuts samples into slices of tokens."""

    slices: int = option(
        2,
        "number of slices of a sample's tokens, which pass through the stages one after another; later slices, whose "
        "tokens attend to more keys, are shorter",
    )


class Sliced(ScheduleChoice):
    """A schedule that cuts samples into slices."""

    def arguments(self, config: Any) -> dict[str, Any]:
        check_slices(config)
        return {**super().arguments(config), "sizes": slice_sizes(config)}

    def variants(self, config: Any) -> list[dict[str, Any]]:
        return [{"slices": getattr(config.options.get("schedule"), "slices", 2)}]


def _optimal(p: int, m: int, costs: Costs | None = None, memory_limit: float | None = None) -> Schedule:
    """Search for the shortest schedule, starting from zb-auto's. If it is not proved to be shortest, its name says so."""
    limit = 2 * p if memory_limit is None else int(memory_limit)
    costs = costs or Costs()
    found = optimal(p, m, costs, limit, start=zb_auto(p, m, costs, limit))
    if found.proved:
        return found.schedule
    return replace(found.schedule, name=f"optimal, not proved: none takes less than {found.bound:g}")


@dataclass(frozen=True)
class OffloadOptions:
    """The options of a schedule with a limit on live activations."""

    of: Literal["1f1b", "gpipe", "breadth-first", "interleaved"] = option("1f1b", "the order of the work")
    limit: int = option(
        2, "activations of a stage for a microbatch that a rank holds at once; more wait in CPU memory"
    )


class Offloaded(ScheduleChoice):
    """A schedule that offloads activations beyond a limit; the planner prices the schedule without the limit."""

    unpriced = "limit"

    def check(self, config: Any) -> None:
        names = {"offload_activations": False, "partition_activations": False, "compile": "none"}
        for name, default in names.items():
            if getattr(config, name) != default:
                raise ValueError(
                    f"schedule=offloaded moves what blocks save, and {name}={getattr(config, name)}; leave one out"
                )

    def priced_as(self, config: Any) -> str:
        return str(config.options["schedule"].of)

    def variants(self, config: Any) -> list[dict[str, Any]]:
        return [{"limit": 1}]


SEQ1F1B = Sliced(
    seq1f1b,
    takes=("slices", "sizes"),
    options=SliceOptions,
    pipeline="minipar.extras.schedules.sliced_pipeline:SlicedPipeline",
    help="1f1b over slices of tokens",
)
V_MIN = ScheduleChoice(v_min, 2, v_shaped=True, help="a V with a third of 1f1b's memory")
CHIMERA = ScheduleChoice(chimera, help="1f1b from both ends, on two copies of the model")
DUALPIPE = ScheduleChoice(dualpipe, help="dualpipe-v unfolded, on two copies of the model")
OFFLOADED = Offloaded(
    offloaded,
    takes=("of", "limit"),
    options=OffloadOptions,
    pipeline="minipar.extras.schedules.offloaded_pipeline:OffloadedPipeline",
    help="another schedule, whose ranks hold at most some activations; the others wait in CPU memory",
)
OPTIMAL = ScheduleChoice(
    _optimal, takes=("costs", "memory_limit"), help="the shortest schedule, by exact search (needs OR-tools)"
)
