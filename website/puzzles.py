"""Puzzles for the site: the texts of their page, and the verdict on a program as plain values. No torch."""

from __future__ import annotations

from html import escape
from pathlib import Path

from minipar.learn.puzzles.puzzle import Puzzle
from minipar.learn.puzzles.registry import PUZZLES, find_puzzle
from minipar.learn.puzzles.running import Run
from minipar.learn.puzzles.verdicts import check, figure_text, unreadable

MOST_CHARACTERS = 50_000
MOST_BARS = 2_000


def program_of(request: dict) -> str:
    """Return the program of a request. Raises ValueError where it is too long."""
    program = str(request.get("program", ""))
    if len(program) > MOST_CHARACTERS:
        raise ValueError(f"the program has {len(program):,} characters; use {MOST_CHARACTERS:,} or fewer")
    return program


def read(request: dict) -> dict:
    """Return what is wrong with a program that Python cannot read, and in which line; run nothing."""
    verdict = unreadable(program_of(request))
    return {"text": verdict.text, "line": verdict.line} if verdict else {"text": "", "line": None}


def puzzle(request: dict) -> dict:
    """Return the verdict on a learner's program: whether it is right, the sentence, its line, figures and a picture."""
    chosen = find_puzzle(str(request.get("puzzle", "")))
    verdict = check(chosen, program_of(request))
    return {
        "right": verdict.is_right,
        "text": verdict.text,
        "line": verdict.line,
        "figures": [figure_text(figure) for figure in verdict.figures],
        "printed": verdict.run.printed if verdict.run else [],
        "picture": picture(verdict.run) if verdict.run else None,
    }


def picture(done: Run) -> dict | None:
    """Return a run as a timeline in milliseconds: a row of computing and one of sending for each rank, and its memory."""
    world = done.world
    if not world.spans or len(world.spans) > MOST_BARS:
        return None
    kinds = [kind for kind in (False, True) if any((span.op == "S") == kind for span in world.spans)]
    names: list[str] = []
    rows: list[list] = []
    for rank in range(world.num_ranks):
        for sends in kinds:
            names.append("sends" if sends and len(kinds) == 2 else f"rank {rank}")
            own = [span for span in world.spans if span.rank == rank and (span.op == "S") == sends]
            rows.append(
                [[span.op, len(rows), span.label, span.begin_s * 1e3, span.end_s * 1e3] for span in own]
            )
    steps = [[[time * 1e3, held / 1e6] for time, held, _ in memory.history] for memory in world.memories]
    return {
        "names": names,
        "ranks": rows,
        "stage_rank": list(range(len(rows))),
        "slices": 1,
        "live": steps,
        "live_word": "MB",
        "peak_live": [round(memory.peak()[1] / 1e6) for memory in world.memories],
    }


# The editor, in the first puzzle's section; the page's script moves it to the section that is chosen.
WORK = Path(__file__).with_name("editor.html")


def sections() -> str:
    """Return Markdown with task, stub, hints and known answer of each puzzle: readable without JavaScript."""
    return "\n".join(_section(number, one) for number, one in enumerate(PUZZLES.values(), 1))


def buttons() -> str:
    """Return the buttons by which a puzzle is chosen."""
    return "".join(
        f'<button type="button" data-name="{one.name}" aria-pressed="{"true" if number == 1 else "false"}">'
        f"{number}. {escape(one.title)}</button>"
        for number, one in enumerate(PUZZLES.values(), 1)
    )


def _section(number: int, one: Puzzle) -> str:
    num_lines = one.stub.count("\n") + 1
    lines = "\n".join(map(str, range(1, num_lines + 1)))
    stub = escape(one.stub).replace("\n", "&#10;")
    work = WORK.read_text(encoding="utf-8").format(lines=lines, rows=max(num_lines, 8), stub=stub)
    parts = [
        f'<section class="puzzle{" chosen" * (number == 1)}" id="puzzle-{one.name}" markdown>',
        f"## {number}. {one.title}",
        f"*About {one.minutes} minutes; lesson {one.lesson}.*",
        one.task.strip(),
        f"*{one.conditions}*",
        f"```python\n{one.stub}```",
        *([work] if number == 1 else []),
        *(f'??? tip "Hint {i}"\n    {hint}' for i, hint in enumerate(one.hints, 1)),
        '??? success "A known answer"\n    ```python\n' + _indented(one.answer) + "    ```",
        "</section>",
    ]
    return "\n\n".join(parts) + "\n"


def _indented(text: str) -> str:
    return "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))


def stubs() -> list[dict]:
    """Return name, title and stub of each puzzle, for the page's list and editor."""
    return [{"name": one.name, "title": one.title, "stub": one.stub} for one in PUZZLES.values()]
