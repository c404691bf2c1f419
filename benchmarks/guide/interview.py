"""The interview book as Markdown: one page per topic, and an index.

python -m benchmarks.guide.interview lessons/interview
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.guide.boards import design_page, walkthrough_page, walkthroughs
from minipar.learn.quiz.book import Question, book, topics

LEVELS = {1: "everybody is asked", 2: "to work on training", 3: "to build it"}


def pages(cells: dict[str, str]) -> dict[str, str]:
    """Return file name -> text of every page: `pages_of_questions`, and the system designs, which are slow to compute.

    cells   id of a lesson's cell -> file name of its notebook, for the links to proofs
    """
    return {**pages_of_questions(cells), "system-designs.md": design_page()}


def pages_of_questions(cells: dict[str, str]) -> dict[str, str]:
    """Return file name -> text of the index, of each topic's page, and of the walkthroughs."""
    written = {f"{topic.replace(' ', '-')}.md": _page(topic, cells) for topic in topics()}
    rows = [
        f"| [{topic}]({topic.replace(' ', '-')}.md) | {sum(q.topic == topic for q in book())} |"
        for topic in topics()
    ]
    index = [
        "# The interview book",
        "",
        f"{len(book())} questions with spoken answers of at most 90 words, the follow-up and its answer, what",
        "sounds right and is not, and what shows it: a cell of a lesson, a test, a file of the ground floor, or a",
        "publication. Figures that follow from a formula are recomputed by a test. `minipar quiz` asks them; `minipar",
        "quiz --json` writes them for flash cards.",
        "",
        "| topic | questions |",
        "|---|---|",
        *rows,
        "",
        f"[At the whiteboard](whiteboard.md): {len(walkthroughs())} walkthroughs.",
        "[System designs](system-designs.md): spoken, with numbers of the planner.",
    ]
    return {"README.md": "\n".join(index) + "\n", **written, "whiteboard.md": walkthrough_page()}


def _page(topic: str, cells: dict[str, str]) -> str:
    asked = sorted((q for q in book() if q.topic == topic), key=lambda q: q.level)
    return "\n".join([f"# {topic.capitalize()}", "", *(_entry(q, cells) for q in asked)])


def _entry(question: Question, cells: dict[str, str]) -> str:
    return "\n".join(
        [
            f"## {question.question}",
            "",
            f"*{LEVELS[question.level]}*",
            "",
            question.answer,
            "",
            f"- **Next**: {question.follow_up} {question.follow_up_answer}",
            f"- **Trap**: {question.trap}",
            f"- **Shown by**: {proof_link(question.proof, cells)}",
            "",
        ]
    )


def proof_link(proof: str, cells: dict[str, str]) -> str:
    """Return the proof of an answer as Markdown, with a link relative to lessons/interview/."""
    kind, _, what = proof.partition(" ")
    if kind == "lesson":
        return f"[lesson {what[:2]}](../{cells[what]}), cell `{what[3:]}`"
    if kind == "floor":
        return f"[`minipar/simple/{what}.py`](../../minipar/simple/{what}.py)"
    if kind == "source":
        return what
    file, _, name = what.partition("::")
    return f"[`{name}`](../../{file})"


def cells_of(lessons: Path) -> dict[str, str]:
    """Return "NN-id" -> file name for every cell of every notebook in the folder; NN is the lesson's number."""
    found = {}
    for path in sorted(lessons.glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            found[f"{path.name[:2]}-{cell['id'].removeprefix(path.name[:2] + '-')}"] = path.name
    return found


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages(cells_of(folder.parent)).items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
