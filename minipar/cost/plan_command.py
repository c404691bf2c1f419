"""The work of `minipar plan`: search or explain, and print. The command draws."""

from __future__ import annotations

import json
from typing import NamedTuple

from minipar.cost.layout import Job, Layout, obstacle, parse_layout
from minipar.cost.machines import find_machine
from minipar.cost.model_table import find_model
from minipar.cost.planner import Plan, plan
from minipar.cost.reasons import no_fit, reasons
from minipar.cost.report import explain_text, plan_json, plan_text, run_lines


class Outcome(NamedTuple):
    """Text to print, and data to draw: layouts to itemise, and the plan, if there was a search."""

    text: str
    job: Job
    layouts: list[Layout]
    plan: Plan | None


def plan_command(
    model: str,
    gpus: int,
    machine: str,
    seq: int,
    batch: int,
    precision: str = "mixed",
    explain: str | None = None,
    as_json: bool = False,
    run: bool = False,
    top: int = 10,
) -> Outcome:
    """Do what `minipar plan` was asked for; arguments as in its --help.

    Raises ValueError for a name that is unknown, a layout that is not legal, or a job that does not fit.
    """
    if top < 1:
        raise ValueError(f"top={top}; use 1 or more")
    job = Job(find_model(model), find_machine(machine), gpus, seq, batch, precision)
    if explain is not None:
        return _explained(job, parse_layout(explain), as_json, run)
    found = plan(job, top)
    if not found.best:
        raise ValueError(no_fit(found))
    why, winner = reasons(found), found.best[0].layout
    text = json.dumps(plan_json(found, why), indent=1) if as_json else plan_text(found, why)
    return Outcome(_with_commands(text, job, winner, run), job, [c.layout for c in found.best[:4]], found)


def _explained(job: Job, layout: Layout, as_json: bool, run: bool) -> Outcome:
    why = obstacle(job, layout)
    if why is not None:
        raise ValueError(f"layout {layout.name} is not legal: {why}")
    if as_json:
        from minipar.cost.memory import worst_rank_memory
        from minipar.cost.timing import step_time

        (rank, items), step = worst_rank_memory(job, layout), step_time(job, layout)
        values = {
            "layout": layout.name,
            "seconds": step.total,
            "mfu": step.mfu,
            "hfu": step.hfu,
            "parts": step.parts,
        }
        text = json.dumps(values | {"fullest_pp_rank": rank, "memory": items}, indent=1)
    else:
        text = explain_text(job, layout)
    return Outcome(_with_commands(text, job, layout, run), job, [layout], None)


def _with_commands(text: str, job: Job, layout: Layout, run: bool) -> str:
    return "\n".join([text, "", *run_lines(job, layout)]) if run else text
