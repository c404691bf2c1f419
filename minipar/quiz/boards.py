"""Whiteboard walkthroughs and system designs as Markdown. Their code is the ground floor's, their numbers the planner's."""

from __future__ import annotations

import tomllib
from importlib.resources import files

from minipar.cost.layout import Job
from minipar.cost.machines import find_machine
from minipar.cost.memory import worst_rank_memory
from minipar.cost.model_table import find_model
from minipar.cost.planner import plan
from minipar.cost.reasons import reasons
from minipar.exercises.solution import excerpt


def walkthroughs() -> list[dict]:
    return tomllib.loads((files(__package__) / "walkthroughs.toml").read_text(encoding="utf-8"))[
        "walkthrough"
    ]


def designs() -> list[dict]:
    return tomllib.loads((files(__package__) / "designs.toml").read_text(encoding="utf-8"))["design"]


def walkthrough_page() -> str:
    parts = ["# At the whiteboard", ""]
    for board in walkthroughs():
        parts += [f"## {board['title']}", "", f"*{board['question']}*", ""]
        parts += ["**Derive.** " + " ".join(board["derive"].split()), ""]
        parts += ["**Sketch.**", "", "```", board["sketch"].strip("\n"), "```", ""]
        parts += ["**Write.**", "", "```python", *code_of(board), "```", ""]
        parts += [
            f"**Test.** `SPECIFICATIONS[{board['tests']!r}].check(...)` of `minipar.spec`.",
            "",
            f"**Next.** {board['next']}",
            "",
        ]
    return "\n".join(parts)


def code_of(board: dict) -> list[str]:
    """Return the lines of the walkthrough's functions, without what else they use."""
    pieces = []
    for place in board["code"]:
        module, _, name = place.partition(":")
        pieces.append(excerpt(module, {name}, with_used=False))
    return "\n\n\n".join(pieces).splitlines()


def design_page() -> str:
    parts = ["# System designs", "", "Numbers by `minipar plan`; times are predictions.", ""]
    for design in designs():
        parts += _design(design)
    return "\n".join(parts)


def _design(design: dict) -> list[str]:
    shape, machine = find_model(design["model"]), find_machine(design["machine"])
    job = Job(shape, machine, design["gpus"], design["seq"], design["batch"])
    found = plan(job, top=5)
    rows = [
        f"| `{fit.name}` | {fit.seconds:.3g} s | {fit.num_bytes / 1e9:.0f} GB | {_largest(job, fit.layout)} |"
        for fit in found.best
    ]
    lost = [
        f"- `{r.axis}={r.value}`: {r.text}" for r in reasons(found) if r.axis in ("tp", "pp", "cp", "zero")
    ]
    return [
        f"## {design['title']}",
        "",
        " ".join(design["say"].split()),
        "",
        "| layout | a step | fullest rank | most of it |",
        "|---|---|---|---|",
        *rows,
        "",
        "Why others lose to the first:",
        "",
        *lost,
        "",
        "What is asked next:",
        "",
        *(f"- {question}" for question in design["asks"]),
        "",
    ]


def _largest(job: Job, layout) -> str:
    _, parts = worst_rank_memory(job, layout)
    name = max(parts, key=parts.__getitem__)
    return f"{name}, {parts[name] / 1e9:.0f} GB"
