"""Format a dry run as text: what ranks hold and send, and a verdict."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from typing import Any

from minipar.extras.dry_run.run import COMMS, DryRun, Holding

WIDTH = 112


def report(result: DryRun) -> str:
    """Format a dry run: a table with a line for each set of equal ranks, assumptions, verdict."""
    parts = [
        _table(result),
        _assumptions(result),
        _by_symmetry(result),
        verdict(result),
    ]
    return "\n\n".join(part for part in parts if part)


def verdict(result: DryRun) -> str:
    """Say whether the run would end and fit in memory; faults come first."""
    name, size = result.config.mesh_name, result.config.world_size
    if result.faults:
        lines = [f"{name} WOULD NOT RUN:", *(f"  {fault}" for fault in result.faults)]
        return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="    ") for line in lines)
    computed = len(result.programs)
    which = f"{size:,} ranks" if computed == size else f"the {computed} computed ranks to each other"
    sound = (
        f"each of {result.num_messages:,} messages of {which} has its receive, of the same bytes and in the same "
        "order"
        if computed > 1
        else "one rank was computed, so there are no messages to match"
    )
    peak = max(rank.holding.peak for rank in result.ranks.values())
    if over := result.over_memory:
        assert result.memory_bytes is not None
        many = f"ranks {_ranges(over)} need" if len(over) > 1 else f"rank {over[0]} needs"
        said = f"{name} DOES NOT FIT: {many} up to {_bytes(peak)}, of {_bytes(result.memory_bytes)}; {sound}."
    else:
        fits = "" if result.memory_bytes is None else f" of {_bytes(result.memory_bytes)}"
        said = f"{name} would run: {sound}. The fullest rank holds {_bytes(peak)}{fits} at the worst moment of a step."
    return textwrap.fill(said, WIDTH)


def _table(result: DryRun) -> str:
    """Return a table with a line for the ranks of a stage that hold and send as much, as far as it is printed."""
    if not result.ranks:
        return ""
    axes = [axis for axis in COMMS if any(rank.sent[axis] for rank in result.ranks.values())]
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, rank in sorted(result.ranks.items()):
        cells = [_bytes(x) for x in (*rank.holding, *(rank.sent[axis] for axis in axes))]
        alike[rank.coordinates.pp, *cells, f"{rank.messages:,}"].append(number)
    rows = [["ranks", *Holding._fields, *(f"over {axis}" for axis in axes), "messages"]]
    rows += [[_ranges(numbers), *cells] for (_, *cells), numbers in alike.items()]
    return "\n".join(["What a rank holds, and sends in a step:", *_aligned(rows)])


def _aligned(rows: list[list[str]]) -> list[str]:
    """Format rows of cells as lines: the first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def _assumptions(result: DryRun) -> str:
    return textwrap.fill(f"Assumed: {'; '.join(result.assumed)}.", WIDTH) if result.assumed else ""


def _by_symmetry(result: DryRun) -> str:
    """Say which ranks were run, and what is taken to hold for the others."""
    computed = [program.rank for program in result.programs]
    others = result.config.world_size - len(computed)
    said = (
        f"Of {len(computed)} kinds of ranks the first was computed ({_ranges(computed)}). The {others:,} others are taken "
        "to be like it: their bytes may differ by an uneven part of a shard, and their messages were not matched. With "
        "smaller dp and tp, up to 64 ranks, all are."
    )
    return textwrap.fill(said, WIDTH) if others else ""


def _ranges(numbers: list[int]) -> str:
    """Format ascending numbers as ranges: "0-3, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _bytes(number: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(number) >= factor:
            return (
                f"{number / factor:.3g} {unit}"
                if number / factor < 1000
                else f"{number / factor:,.0f} {unit}"
            )
    return f"{number:.0f} B"
