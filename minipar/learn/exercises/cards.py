"""Problems for pen and paper, asked one after another; the answer and its calculation follow each.

python -m minipar.learn.exercises.cards lessons/problems.md    writes all of them, with worked answers, as a page
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from random import Random

from minipar.learn.exercises.problems import LESSONS, PROBLEMS, Card
from minipar.support.errors import one_of

WIDTH = 100
NUM_MIXED = 10  # number of problems if no lesson is named, each from another lesson
PAGE_SEED = 0


def draw_cards(seed: int | None = None, lesson: str = "") -> list[Card]:
    """Return a lesson's problems, or one problem from each of ten random lessons; `seed` makes the draw repeatable.

    Raises ValueError for a lesson that does not exist.
    """
    rng = Random(seed)
    if lesson:
        wanted = lesson.zfill(2)
        if wanted not in LESSONS:
            raise ValueError(f"lesson={lesson} is unknown; use {one_of(LESSONS)}")
        return [problem(rng) for problem in PROBLEMS if problem.lesson == wanted]
    of_lessons = sorted(rng.sample(LESSONS, NUM_MIXED))
    return [rng.choice([p for p in PROBLEMS if p.lesson == one])(rng) for one in of_lessons]


def ask(cards: list[Card], read: Callable[[str], str], show: Callable[[str], None]) -> int:
    """Ask each question, read an answer ("" gives up), and show whether it is right and why. Return the number right."""
    num_right = 0
    for number, card in enumerate(cards, 1):
        show("\n" + question_text(number, card))
        right = judged(card, read(f"   {card.unit}? "))
        num_right += right is True
        verdict = {True: "Right.", False: "No.", None: ""}[right]
        show("\n".join(filter(None, [verdict and f"   {verdict}", answer_text(card)])))
    return num_right


def judged(card: Card, text: str) -> bool | None:
    """Return whether `text` is the right answer, within the card's tolerance; None if it is not a number."""
    try:
        given = float(text.strip().replace(",", ""))
    except ValueError:
        return None
    return abs(given - card.answer) <= card.within * abs(card.answer) + 1e-9


def question_text(number: int, card: Card) -> str:
    return textwrap.fill(f"{number}. {card.question}", WIDTH, subsequent_indent="   ")


def answer_text(card: Card) -> str:
    """Return the worked lines; the last ends in the answer."""
    return "\n".join(f"   {line}" for line in worked_lines(card))


def worked_lines(card: Card) -> list[str]:
    *formulas, numbers = card.worked
    return [*formulas, f"{numbers} = {card.answer:.4g} {card.unit}"]


def printed(cards: list[Card]) -> str:
    """Return all questions, then all answers, to be printed on paper."""
    questions = [question_text(number, card) for number, card in enumerate(cards, 1)]
    answers = [f"{number}.{answer_text(card)[2:]}" for number, card in enumerate(cards, 1)]
    return "\n\n".join([*questions, "Answers", "\n".join(answers)])


def page(titles: dict[str, tuple[str, str]]) -> str:
    """Return the page of all problems, with one draw of numbers; each worked answer is folded.

    titles   lesson number -> (title, file name of the notebook)
    """
    rng = Random(PAGE_SEED)
    parts = [
        "# Problems on paper",
        "Three problems for each lesson, the first about what bounds it. Do them with a pencil, then unfold the answer.",
        "`minipar exercise cards 06` asks those of lesson 06 with fresh numbers, and judges what you type; `minipar\n"
        "exercise cards` asks ten, each of another lesson. "
        "16-bit elements have 2 bytes, GB are 10^9 bytes, and rates are those of one direction.",
    ]
    for lesson in LESSONS:
        title, file = titles[lesson]
        parts.append(f"## [{lesson} {title}]({file})")
        for number, problem in enumerate((p for p in PROBLEMS if p.lesson == lesson), 1):
            card = problem(rng)
            worked = "\n".join(f"    {line}" for line in worked_lines(card))
            parts.append(f"**{number}.** {card.question}")
            parts.append(f"<details><summary>Worked answer</summary>\n\n{worked}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def titles_of(lessons: Path) -> dict[str, tuple[str, str]]:
    """Return the title and the file name of each lesson in the folder, by its number, as README.md there lists them."""
    rows = [line.split(" | ") for line in (lessons / "README.md").read_text(encoding="utf-8").splitlines()]
    links = {row[0].lstrip("| "): row[1] for row in rows if len(row) > 1 and row[1].startswith("[")}
    return {
        number: (link[1 : link.index("]")], link[link.index("(") + 1 : -1]) for number, link in links.items()
    }


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(page(titles_of(target.parent)), encoding="utf-8")
