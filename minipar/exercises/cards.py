"""Problems for pen and paper, asked one after the other, with the answer and the worked line after each."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from random import Random

from minipar.exercises.problems import PROBLEMS, Card

WIDTH = 100


def draw_cards(seed: int | None = None) -> list[Card]:
    """Return the ten problems, with numbers drawn from the seed; without one, with fresh numbers each time."""
    rng = Random(seed)
    return [problem(rng) for problem in PROBLEMS]


def ask(cards: list[Card], read: Callable[[str], str], show: Callable[[str], None]) -> int:
    """Ask each question, read an answer ("" to see it), show whether it is right, and the worked line; count the right."""
    num_right = 0
    for number, card in enumerate(cards, 1):
        show("\n" + question_text(number, card))
        right = judged(card, read(f"   {card.unit}? "))
        num_right += right is True
        verdict = {True: "Right. ", False: "No. ", None: ""}[right]
        show(f"   {verdict}{answer_text(card)}")
    return num_right


def judged(card: Card, text: str) -> bool | None:
    """Return whether the text is the answer, within the card's tolerance; None where it is not a number."""
    try:
        given = float(text.strip().replace(",", ""))
    except ValueError:
        return None
    return abs(given - card.answer) <= card.within * abs(card.answer) + 1e-9


def question_text(number: int, card: Card) -> str:
    return textwrap.fill(f"{number}. {card.question}", WIDTH, subsequent_indent="   ")


def answer_text(card: Card) -> str:
    return f"{card.answer:.4g} {card.unit}:  {card.worked}"


def printed(cards: list[Card]) -> str:
    """Return all questions, then all answers, for paper."""
    questions = [question_text(n, card) for n, card in enumerate(cards, 1)]
    answers = [f"{n}. {answer_text(card)}" for n, card in enumerate(cards, 1)]
    return "\n\n".join([*questions, "Answers", "\n".join(answers)])
