"""A pipeline's timeline as text: the classic grid, one row per rank and one column per unit of time."""

from __future__ import annotations

from minipar.schedules import Action, Timeline

MOST_COLUMNS = 400


def grid_text(timeline: Timeline) -> str:
    """Return the headline, then one row per rank with its peak activations at the end.

    "F3" is the forward of microbatch 3, "F3.1" the forward of its slice 1, "·" idle time. A column is as long as the
    shortest action, or 1/400 of the makespan where that is longer; an action of several columns shows dashes after its
    name. Where a rank holds several stages, a, b, ... z, aa, ab, ... name them in order. In a pipeline of two directions,
    a is the direction down from rank 0, and b the direction up.
    """
    start, unit = _origin(timeline), _unit(timeline)
    columns = _column(timeline.makespan / unit)
    width = 1 + max((len(_label(timeline, action)) for action in timeline.spans), default=0)
    lines = []
    for rank, actions in enumerate(timeline.schedule.actions):
        cells = ["·".ljust(width)] * columns
        for action in actions:
            first, last = (_column((t - start) / unit) for t in timeline.spans[action])
            names = [_label(timeline, action).ljust(width), *["─" * (width - 1) + " "] * (last - first)]
            cells[first:last] = names[: last - first]
        lines.append(f"rank {rank:<3} {''.join(cells)} live {timeline.peak_live[rank]}")
    return "\n".join([headline(timeline), *lines])


def headline(timeline: Timeline, unit: str = "") -> str:
    """Return the schedule's name, sizes and makespan, and its bubble in both conventions. `unit` follows times."""
    schedule = timeline.schedule
    shorter = timeline.longest_own_span < (1 - 1e-9) * timeline.makespan
    own_span = f" (longest own span {timeline.longest_own_span:.4g}{unit})" if shorter else ""
    num_slices = getattr(schedule, "slices", 1)
    slices = f" of {num_slices} slices" if num_slices > 1 else ""
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches{slices}; "
        f"makespan {timeline.makespan:.4g}{unit}{own_span}; "
        f"bubble {timeline.bubble_over_total:.1%} of total time, {timeline.bubble_over_ideal:.1%} of ideal time"
    )


def chunk_of(timeline: Timeline, action: Action) -> int:
    """Return the index (0, 1, ...) of the action's stage among its rank's stages."""
    schedule = timeline.schedule
    return schedule.stages_of(schedule.stage_rank[action.stage]).index(action.stage)


def _label(timeline: Timeline, action: Action) -> str:
    several = timeline.schedule.num_stages > timeline.schedule.num_ranks
    name = action.op + timeline.schedule.label(action.microbatch)
    return name + (_letters(chunk_of(timeline, action)) if several else "")


def _letters(number: int) -> str:
    """Return the letters of a number, counted like columns of a spreadsheet: a, b, ... z, aa, ab, ..."""
    before, last = divmod(number, 26)
    return (_letters(before - 1) if before else "") + chr(ord("a") + last)


def _origin(timeline: Timeline) -> float:
    return min((start for start, _ in timeline.spans.values()), default=0.0)


def _unit(timeline: Timeline) -> float:
    shortest = min((end - start for start, end in timeline.spans.values() if end > start), default=1.0)
    return max(shortest, timeline.makespan / MOST_COLUMNS)


def _column(units: float) -> int:
    return int(units + 0.5)  # rounds halves up: an action of one unit always has a column
