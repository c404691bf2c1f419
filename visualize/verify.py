"""The sweep of `minipar verify --all` as a picture and as a table: rows are meshes, columns schedules and ZeRO stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.patches import Rectangle

from minipar.train.verification.verify import Verification
from minipar.visualize.style import BLUE, FAINT, NORMAL, SMALL, VERMILION, new_figure, text_on, write

NO_PIPELINE = "no pipeline"
STAGES = range(4)  # of ZeRO
GROUP = 4.5  # from one schedule's first column to the next one's, in columns
LEAST_COLUMNS = 24  # the width that the sentence below the cells needs


def draw_sweep(results: Sequence[Verification], path: str | Path) -> Path:
    """Draw one cell per run, with the exponent of the largest difference; blue where every tensor equals one process's.

    Each schedule has four columns, one for each stage of ZeRO. A mesh has a row; grey cells are not legal.
    """
    cells: dict[tuple[str, str, int], Verification] = {
        (r.config.mesh_name, _schedule(r), r.config.zero): r for r in results
    }
    meshes = list(dict.fromkeys(mesh for mesh, *_ in cells))
    schedules = sorted({schedule for _, schedule, _ in cells}, key=_order)
    columns = max(GROUP * len(schedules), LEAST_COLUMNS)
    figure = new_figure(2.2 + 0.3 * columns, 1.6 + 0.3 * len(meshes))
    axes = figure.subplots()
    axes.text(-0.1, -0.3, "ZeRO", ha="right", va="center", fontsize=NORMAL)
    for row, mesh in enumerate(meshes):
        axes.text(-0.1, row + 0.5, mesh, ha="right", va="center", fontsize=NORMAL)
    for group, schedule in enumerate(schedules):
        axes.text(GROUP * group + 2, -1.1, schedule, ha="center", va="center", fontsize=NORMAL)
        for zero in STAGES:
            column = GROUP * group + zero
            axes.text(column + 0.5, -0.3, str(zero), ha="center", va="center", fontsize=SMALL)
            for row, mesh in enumerate(meshes):
                result = cells.get((mesh, schedule, zero))
                colour = FAINT if result is None else BLUE if result.equal else VERMILION
                axes.add_patch(_cell(column, row, colour))
                if result is not None:
                    axes.text(
                        column + 0.5,
                        row + 0.5,
                        _exponent(result.difference),
                        ha="center",
                        va="center",
                        fontsize=SMALL,
                        color=text_on(colour),
                    )
    equal = sum(result.equal for result in results)
    axes.text(
        0, len(meshes) + 0.6, f"{equal} of {len(results)} give the numbers of one process; "
        "in a cell, the largest relative difference of any tensor, as a power of ten", fontsize=NORMAL, va="center",
    )  # fmt: skip
    axes.set_xlim(-3.5, columns + 1)
    axes.set_ylim(len(meshes) + 1, -1.7)
    axes.axis("off")
    return write(figure, path)


def sweep_markdown(results: Sequence[Verification]) -> str:
    """Format the sweep as a Markdown table."""
    meshes, variants, cells = _grid(results)
    lines = ["| mesh | " + " | ".join(variants) + " |", "|---" * (len(variants) + 1) + "|"]
    for mesh in meshes:
        found = [cells.get((mesh, variant)) for variant in variants]
        words = [
            "" if r is None else f"{r.difference:.0e}" if r.equal else f"**{r.difference:.0e}**"
            for r in found
        ]
        lines.append(f"| {mesh} | " + " | ".join(words) + " |")
    return "\n".join(lines) + "\n"


def _grid(
    results: Sequence[Verification],
) -> tuple[list[str], list[str], dict[tuple[str, str], Verification]]:
    """Return the meshes, the variants, and the result for each pair of them."""
    cells = {(r.config.mesh_name, _variant(r)): r for r in results}
    return list(dict.fromkeys(m for m, _ in cells)), sorted({v for _, v in cells}, key=_order), cells


def _schedule(result: Verification) -> str:
    return result.config.schedule if result.config.pp > 1 else NO_PIPELINE


def _variant(result: Verification) -> str:
    return f"{_schedule(result)}, ZeRO-{result.config.zero}"


def _order(variant: str) -> tuple[bool, str]:
    return not variant.startswith(NO_PIPELINE), variant


def _cell(column: float, row: int, colour: str) -> Rectangle:
    return Rectangle((column + 0.04, row + 0.06), 0.92, 0.88, facecolor=colour)


def _exponent(difference: float) -> str:
    """Return a difference's power of ten, which fits a narrow cell; "=" where the difference is zero."""
    if not math.isfinite(difference):
        return "inf"
    return "=" if difference == 0 else str(math.floor(math.log10(difference)))
