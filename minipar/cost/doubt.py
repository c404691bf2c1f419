"""The uncertainty ("doubt") of a predicted time: what four runs of five of programs that nothing was fitted to lie within.

    dense      0.15 + 0.02 lg(nodes) + 0.05 for each unlike thing: a machine without a dense run, cp, an unusual layout
    mixture    0.32 + 0.02 lg(nodes) + 0.05 for each

0.15 and 0.32 come from published runs, each program predicted by numbers fitted to the others (docs/generated/planner.md
counts what the intervals hold). 0.02 for each doubling of the nodes is an assumption: in those runs errors hardly grow with
nodes, but other clusters were found to lose half of their speed from 1 to 32.
"""

from __future__ import annotations

from math import log2

from minipar.cost.layout import Job, Layout

DENSE, MIXED, PER_DOUBLING, UNLIKE = 0.15, 0.32, 0.02, 0.05

# The machines of dense runs. Other machines are assumed to reach the same fractions of their data-sheet rates.
COMPARED = ("a100-40gb", "a100-80gb", "h100", "h200")

# Of two layouts of one job, the predicted ratio of their times errs by less than this in four pairs of five: held-out
# runs of one model in one table.
NEAR = 0.07

USUAL_SCHEDULES = ("1f1b", "gpipe", "interleaved")  # simplest first; no published run has another


def unusual(job: Job, a: Layout) -> str:
    """Say what few programs have of this layout, and no published run: tp beyond a node, a schedule; "" if nothing."""
    if a.tp > job.machine.gpus_per_node:
        return f"tp={a.tp}, more than a node"
    return a.schedule if a.pp > 1 and a.schedule not in USUAL_SCHEDULES else ""


def doubt(job: Job, layout: Layout) -> float:
    """Return the relative error that the predicted time of a layout stays within, for four runs of five."""
    nodes = -(-job.gpus // job.machine.gpus_per_node)
    unlike = (job.machine.name not in COMPARED) + (layout.cp > 1) + bool(unusual(job, layout))
    return (MIXED if job.shape.num_experts else DENSE) + PER_DOUBLING * log2(nodes) + UNLIKE * unlike
