"""The interview book as values, read from `book.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from minipar.errors import one_of


class Question(NamedTuple):
    """One entry of the book.

    level   1: everybody is asked; 2: to work on training; 3: to build it
    answer  40 to 90 spoken words
    proof   what shows it: "lesson 01-14", a cell by its id; "test FILE::NAME"; "floor FILE", a file of minipar.simple
    shows   each number of the answer, and the expression that computes it
    """

    id: str
    topic: str
    level: int
    question: str
    answer: str
    follow_up: str
    trap: str
    proof: str
    shows: dict[str, str] = {}


@cache
def book() -> tuple[Question, ...]:
    entries = tomllib.loads((files(__package__) / "book.toml").read_text(encoding="utf-8"))["question"]
    return tuple(Question(**{**entry, "answer": " ".join(entry["answer"].split())}) for entry in entries)


def topics() -> tuple[str, ...]:
    return tuple(dict.fromkeys(question.topic for question in book()))


def questions_on(wanted: Iterable[str]) -> list[Question]:
    """Return the questions of these topics, all if none is named. A topic may be written with hyphens.

    Raises ValueError, with the nearest name, for a topic that the book does not have.
    """
    names = {name.replace("-", " ").lower() for name in wanted}
    for name in sorted(names - set(topics())):
        raise ValueError(f"topic={name!r} is unknown; use {one_of(topics(), near=name)}")
    return [question for question in book() if not names or question.topic in names]


def as_entries(questions: Iterable[Question]) -> list[dict]:
    """Return the questions for flash cards: question, answer, topic, level, proof and the rest of each entry."""
    return [{k: v for k, v in question._asdict().items() if k != "shows"} for question in questions]
