"""A picture of the roofline of serving: time per output token and tokens per second, against the batch size."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.cost.serving import rows_where_arithmetic_begins, stored_bytes
from minipar.cost.serving_plan import Replica, ServingJob, tensor_parallel_sizes
from minipar.visualize.style import (
    BLUE,
    GREEN,
    INK,
    NORMAL,
    ORANGE,
    PURPLE,
    SMALL,
    VERMILION,
    new_figure,
    quiet,
    write,
)

COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE)


def draw_serving_plan(job: ServingJob, path: str | Path) -> Path:
    """Write `serving_plan_figure` to a .png, .svg or .pdf; return the path."""
    return write(serving_plan_figure(job), path)


def serving_plan_figure(job: ServingJob) -> Figure:
    """Draw, for each tp whose weights fit, the ms of a decode step, and tokens per second and GPU, against the batch.

    A line is solid as far as its requests fit at full length, and dotted beyond. The vertical line is the batch from which
    a product takes longer to compute than its weight to read. The horizontal line is the target time per token.

    Raises ValueError if no request fits with any tp.
    """
    replicas = [Replica(job, tp) for tp in tensor_parallel_sizes(job) if job.shape.num_heads % tp == 0]
    replicas = [replica for replica in replicas if replica.fits]
    if not replicas:
        raise ValueError(
            f"model={job.shape.name} fits with no tp; use fewer bits, or a machine with more memory"
        )
    figure = new_figure(9.2, 3.6)
    left, right = figure.subplots(1, 2)
    for replica, colour in zip(replicas, COLOURS):
        _draw_replica(left, right, replica, colour)
    begins = rows_where_arithmetic_begins(job.reached, stored_bytes(job.bits.weights))
    left.axhline(1e3 * job.token_s, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), label="target")
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    right.yaxis.set_major_formatter("{x:,.0f}")
    for axes, title in (
        (left, "ms of a step, without prompts"),
        (right, "tokens a second a GPU; dotted: more requests than fit"),
    ):
        axes.axvline(
            begins,
            color=INK,
            linewidth=1,
            linestyle=(0, (3, 2)),
            label=f"{begins:.0f} rows: a product takes longer\nthan reading its weight",
        )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("requests in a step", fontsize=SMALL)
        axes.set_title(title, loc="left", fontsize=NORMAL)
        quiet(axes, grid="y")
    left.legend(fontsize=SMALL, frameon=False, loc="upper left")
    return figure


def _draw_replica(left: Axes, right: Axes, replica: Replica, colour: str) -> None:
    batches = sorted({round(2 ** (k / 4)) for k in range(41)})  # 1 ... 1,024
    most = min(replica.fits, batches[-1])
    fitting = [*(b for b in batches if b < most), most]
    beyond = [most, *(b for b in batches if b > most)]
    for shown, style, label in ((fitting, "-", f"tp={replica.tp}"), (beyond, ":", None)):
        steps_s = [replica.step_s(b) for b in shown]
        left.plot(shown, [1e3 * s for s in steps_s], style, color=colour, label=label)
        right.plot(shown, [b / s / replica.tp for b, s in zip(shown, steps_s)], style, color=colour)
