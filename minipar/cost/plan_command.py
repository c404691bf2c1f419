"""The work of `minipar plan`: search or explain, and print. The command draws."""

from __future__ import annotations

import json
from typing import NamedTuple

from minipar.cost.auto_split import auto_split as auto_split_of
from minipar.cost.auto_split import split_text
from minipar.cost.compression import advice, check_method, compression_rows, faster_layout
from minipar.cost.layout import Job, Layout, obstacle, parse_layout
from minipar.cost.machines import find_machine
from minipar.cost.model_table import find_model
from minipar.cost.planner import Candidate, Plan, plan
from minipar.cost.reasons import no_fit, reasons
from minipar.cost.report import explain_text, headline, plan_json, plan_text, run_lines


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
    compress: str = "none",
    auto_split: bool = False,
) -> Outcome:
    """Do what `minipar plan` was asked for; arguments as in its --help.

    Raises ValueError for a name that is unknown, a layout that is not legal, or a job that does not fit.
    """
    if top < 1:
        raise ValueError(f"top={top}; use 1 or more")
    check_method(compress)
    job = Job(find_model(model), find_machine(machine), gpus, seq, batch, precision)
    if auto_split:
        if explain is not None or run:
            raise ValueError("auto_split searches for stages of unlike meshes; leave out --explain and --run")
        return _split(job, as_json)
    if explain is not None:
        return _explained(job, parse_layout(explain), as_json, run, compress)
    found = plan(job, top)
    if not found.best:
        raise ValueError(no_fit(found))
    why, winner = reasons(found), found.best[0].layout
    text = json.dumps(plan_json(found, why), indent=1) if as_json else plan_text(found, why)
    fitting = {c.layout for c in found.families.values() if isinstance(c, Candidate)}
    text = _with_compression(text, job, winner, compress, as_json, sorted(fitting, key=lambda a: a.name))
    return Outcome(_with_commands(text, job, winner, run), job, [c.layout for c in found.best[:4]], found)


def _explained(job: Job, layout: Layout, as_json: bool, run: bool, compress: str) -> Outcome:
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
    text = _with_compression(text, job, layout, compress, as_json)
    return Outcome(_with_commands(text, job, layout, run), job, [layout], None)


def _split(job: Job, as_json: bool) -> Outcome:
    split, equal = auto_split_of(job), plan(job, 1)
    best = equal.best[0] if equal.best else None
    if split is None:
        raise ValueError(
            f"{split_text(job, None)}; " + no_fit(equal) if best is None else split_text(job, None)
        )
    if as_json:
        stages = [
            {"first": s.first, "layers": s.num_layers, "gpus": s.gpus, "seconds": s.choice.seconds,
             "bytes": s.choice.num_bytes, "layout": s.choice.layout.name}
            for s in split.stages
        ]  # fmt: skip
        text = json.dumps({"seconds": split.seconds, "samples": split.samples, "stages": stages}, indent=1)
    else:
        text = "\n".join([headline(job), split_text(job, split, best and best.seconds)])
    return Outcome(text, job, [] if best is None else [best.layout], None)


def _with_compression(text: str, job: Job, layout: Layout, compress: str, as_json: bool, others=()) -> str:
    if compress == "none":
        return text
    if not as_json:
        return "\n".join(
            [text, *advice(job, layout, compress), *faster_layout(job, layout, others, compress)]
        )
    rows = compression_rows(job, layout, compress)
    found = {name: {"seconds": seconds, "sent_bytes": sent} for name, seconds, sent in rows}
    return json.dumps(json.loads(text) | {"compress": found}, indent=1)


def _with_commands(text: str, job: Job, layout: Layout, run: bool) -> str:
    return "\n".join([text, "", *run_lines(job, layout)]) if run else text
