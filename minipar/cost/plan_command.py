"""The work of `minipar plan`: search for layouts or explain one, and make the text. `minipar.cli` draws the pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from minipar.cost.layout import Job, Layout, parse_layout, require_legal
from minipar.cost.machines import find_machine
from minipar.cost.model_table import find_model
from minipar.cost.planner import Candidate, Plan, plan
from minipar.cost.programs import PROGRAMS
from minipar.cost.reasons import no_fit, reasons
from minipar.cost.report import explain_json, explain_text, headline, plan_json, plan_text, run_lines
from minipar.support.errors import one_of
from minipar.support.options import make_options
from minipar.support.registry import Choice, Kind

MARGIN = 1 / 16  # the fraction of a GPU's memory to leave free: 5 GB of 80


class Asked(NamedTuple):
    """The request that `minipar plan` passes to a view.

    layout   the best layout found, or the one to explain; None while the request is checked, and None for a view that
             replaces the plan
    others   the best layout of each family that fits at all, as alternatives; empty with --explain
    explain  whether the user gave the layout
    run      whether the user asked for the commands that run the layout
    """

    job: Job
    layout: Layout | None = None
    others: Sequence[Layout] = ()
    explain: bool = False
    run: bool = False


class Answer(NamedTuple):
    """A view's answer: lines of text, the same numbers as JSON entries, layouts to itemise."""

    lines: Sequence[str] = ()
    entries: Mapping[str, Any] = {}
    layouts: Sequence[Layout] = ()


class PlanView(Choice):
    """Something that `minipar plan` can print besides the plan, or instead of it.

    `load` returns a function (asked, options) -> Answer; options is None for a view that declares no options.
    """

    replaces_plan = False

    def check_request(self, asked: Asked, options: Any) -> None:
        """Raise ValueError, before the search, if this view cannot answer the request."""


VIEWS: Kind[PlanView] = Kind("view", {})


class Outcome(NamedTuple):
    """Text to print and data to draw: layouts to itemise, and the plan (None without a search)."""

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
    margin_gb: float | None = None,
    program: str = "minipar",
    view: str = "",
    view_options: Mapping[str, Any] | None = None,
) -> Outcome:
    """Return the outcome of one `minipar plan`; its --help describes the arguments.

    margin_gb  memory of each GPU to leave free; None: a MARGIN of it
    program    a name of PROGRAMS: the training program whose behaviour to assume
    view       the name of one of VIEWS, or "" for none

    Raises ValueError for an unknown name, a layout that is not legal, or a job that does not fit.
    """
    if top < 1:
        raise ValueError(f"top={top}; use 1 or more")
    gpu = find_machine(machine)
    margin_bytes = MARGIN * gpu.memory_bytes if margin_gb is None else 1e9 * margin_gb
    if program not in PROGRAMS:
        raise ValueError(f"program={program!r} is unknown; use {one_of(PROGRAMS, near=program)}")
    job = Job(
        find_model(model), gpu, gpus, seq, batch, precision, PROGRAMS[program].implementation, margin_bytes,
        "" if program == "minipar" else program,
    )  # fmt: skip
    asked = Asked(job, explain=explain is not None, run=run)
    answer = _answering(view, view_options or {}, asked)
    if view and VIEWS[view].replaces_plan:
        found = answer(asked)
        return Outcome(_joined(headline(job), {}, found, as_json), job, list(found.layouts), None)
    searched = None
    if explain is not None:
        layouts = [parse_layout(explain)]
        require_legal(job, layouts[0])
        text, values = explain_text(job, layouts[0]), explain_json(job, layouts[0])
    else:
        searched = plan(job, top)
        if not searched.best:
            raise ValueError(no_fit(searched))
        layouts = [c.layout for c in searched.shown()[:4]]
        text, values = plan_text(searched), plan_json(searched, reasons(searched))
        fitting = {c.layout for c in searched.families.values() if isinstance(c, Candidate)}
        asked = asked._replace(others=sorted(fitting, key=lambda a: a.name))
    found = answer(asked._replace(layout=layouts[0]))
    text = _joined(text, values, found, as_json)
    if run:
        text = "\n".join([text, "", *run_lines(job, layouts[0])])
    return Outcome(text, job, layouts, searched)


def _answering(name: str, options: Mapping[str, Any], asked: Asked) -> Callable[[Asked], Answer]:
    """Check a view's options and the request; return the function that computes its answer (empty without a view)."""
    if not name:
        if options:
            raise ValueError(f"view.{min(options)} is an option of a view, and none is asked for; use view")
        return lambda _: Answer()
    view = VIEWS[name]
    if view.options is None and options:
        raise ValueError(f"view.{min(options)}: view={name} has no options; leave it out")
    made = None if view.options is None else make_options(view.options, "view", dict(options))
    view.check_request(asked, made)
    return lambda request: view.load()(request, made)


def _joined(text: str, values: dict[str, Any], answer: Answer, as_json: bool) -> str:
    if as_json:
        return json.dumps(values | dict(answer.entries), indent=1)
    return "\n".join([text, *answer.lines])
