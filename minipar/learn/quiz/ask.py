"""The quiz in the terminal: questions from the book to answer aloud, and numeric questions with new numbers each time."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from random import Random

from minipar.learn.exercises.cards import answer_text as worked_text
from minipar.learn.exercises.cards import judged
from minipar.learn.exercises.problems import PROBLEMS, Card
from minipar.learn.quiz.book import Question
from minipar.learn.quiz.progress import Progress

Read = Callable[[str], str]  # prompt -> the line typed
Show = Callable[[str], None]
NUMERIC_EVERY = 4  # if no topic is named, every fourth question is numeric


def ask(
    questions: Sequence[Question],
    progress: Progress,
    num: int,
    read: Read,
    show: Show,
    rng: Random,
    numeric: bool = True,
) -> tuple[int, int]:
    """Ask `num` questions, missed ones first. Return how many answers were right, and how many questions were asked.

    read   returns the line that the user types; its EOFError, at the end of the input, ends the quiz
    """
    by_id = {question.id: question for question in questions}
    problems = {problem.name: problem for problem in PROBLEMS} if numeric else {}
    spoken = iter(progress.order(by_id, rng))
    counted = iter(progress.order(problems, rng))
    right = asked = 0
    try:
        for number in range(1, num + 1):
            name = next(counted, None) if numeric and number % NUMERIC_EVERY == 0 else None
            name = name or next(spoken, None)
            if name is None:
                break
            show(f"\n{number} of {num}")
            knew = (
                _numeric(problems[name], read, show, rng)
                if name in problems
                else _spoken(by_id[name], read, show)
            )
            progress.record(name, knew)
            right, asked = right + knew, asked + 1
    except EOFError:
        pass
    return right, asked


def _spoken(question: Question, read: Read, show: Show) -> bool:
    show(wrapped(f"[{question.topic}] {question.question}"))
    read("   say it aloud, then press Enter ")
    show(answer_text(question))
    return _yes("   did you have it? [y/n] ", read)


def _yes(prompt: str, read: Read) -> bool:
    while (answer := read(prompt).strip().lower()[:1]) not in ("y", "n"):
        prompt = "   y or n? "
    return answer == "y"


def _numeric(problem: Callable[[Random], Card], read: Read, show: Show, rng: Random) -> bool:
    card = problem(rng)
    show(wrapped(card.question))
    right = judged(card, read(f"   {card.unit}? ")) is True
    show(f"   {'Right' if right else 'No'}: {card.answer:.4g} {card.unit}\n{worked_text(card)}")
    return right


def answer_text(question: Question) -> str:
    parts = [
        question.answer,
        f"Next: {question.follow_up} {question.follow_up_answer}",
        f"Trap: {question.trap}",
        f"Shown by: {question.proof}",
    ]
    return "\n".join(wrapped(part, "   ") for part in parts)


def without_terminal(questions: Sequence[Question], num: int) -> str:
    """Return the first questions with their answers, for use without a terminal."""
    shown = [f"{wrapped(q.question)}\n{answer_text(q)}" for q in questions[:num]]
    return "\n\n".join(shown)


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent)
