"""The interview book as values, read from `book.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from minipar.learn.facts import quote
from minipar.support.errors import one_of


class Question(NamedTuple):
    """One question of the interview book.

    level   who is asked: 1 everybody; 2 those who will work on training; 3 those who will build training systems
    answer  a spoken answer of 40 to 90 words
    proof   what demonstrates the answer: "lesson 01-14", a cell's id; "test FILE::NAME"; "floor FILE", in minipar.simple;
            or "source TEXT", a publication, for a claim that can be neither computed nor run here
    claim   a text in the proof's code or output that has the number or statement of the answer
    shows   each number in the answer, with the expression that computes it

    follow_up_answer has 30 to 60 words.
    """

    id: str
    topic: str
    level: int
    question: str
    answer: str
    follow_up: str
    follow_up_answer: str
    trap: str
    proof: str
    claim: str = ""
    shows: dict[str, str] = {}


@cache
def book() -> tuple[Question, ...]:
    entries = tomllib.loads((files(__package__) / "book.toml").read_text(encoding="utf-8"))["question"]
    return tuple(
        Question(**quote({**entry, "answer": " ".join(entry["answer"].split())})) for entry in entries
    )


def topics() -> tuple[str, ...]:
    return tuple(dict.fromkeys(question.topic for question in book()))


def questions_on(wanted: Iterable[str]) -> list[Question]:
    """Return the questions on these topics, or all questions if no topic is named. A topic may be written with hyphens.

    Raises ValueError, with the most similar name, for a topic that the book does not have.
    """
    names = {name.replace("-", " ").lower() for name in wanted}
    for name in sorted(names - set(topics())):
        raise ValueError(f"topic={name!r} is unknown; use {one_of(topics(), near=name)}")
    return [question for question in book() if not names or question.topic in names]


def as_entries(questions: Iterable[Question]) -> list[dict[str, Any]]:
    """Return the questions for flash cards: question, answer, topic, level, proof and the rest of each entry."""
    return [
        {k: v for k, v in question._asdict().items() if k not in ("shows", "claim")} for question in questions
    ]
