"""The command `minipar quiz`: its flags and its work."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

import json
import sys
from collections.abc import Callable
from functools import partial
from random import Random

import tyro


def quiz_command(
    topics: tyro.conf.Positional[tuple[str, ...]] = (),
    num: int = 10,
    level: int | None = None,
    seed: int | None = None,
    json: bool = False,
) -> Callable[[], None]:
    """Ask interview questions: some to answer aloud and compare with a model answer, some numeric, with new numbers.

    Missed questions are stored in the user's data folder, and asked first the next time.

    Args:
        topics: topics of the questions, for example pipelines or long-context; all if none are given.
        num: number of questions.
        level: ask only questions for everybody (1), for those who will work on training (2) or build training systems (3).
        seed: seed of the order and of the numbers; different each time if not given.
        json: print the whole book instead, for flash cards.
    """
    return partial(_quiz, topics, num, level, seed, json)


def _quiz(topics: tuple[str, ...], num: int, level: int | None, seed: int | None, as_json: bool) -> None:
    from minipar.learn.quiz.ask import ask, without_terminal
    from minipar.learn.quiz.book import as_entries, questions_on
    from minipar.learn.quiz.progress import Progress, default_path
    from minipar.support.errors import require_positive

    require_positive(num=num)
    if level not in (None, 1, 2, 3):
        raise ValueError(f"level={level!r}; use 1, 2 or 3")
    questions = [q for q in questions_on(topics) if level in (None, q.level)]
    if as_json:
        print(json.dumps(as_entries(questions), indent=1, ensure_ascii=False))
        return
    if not questions:
        raise ValueError(f"no question of level={level} on {', '.join(topics)}; leave --level out")
    rng = Random(seed)
    if not sys.stdin.isatty():
        print(without_terminal(rng.sample(questions, len(questions)), num))
        return
    progress = Progress(default_path())
    if progress.problem:
        print(progress.problem)
    right, asked = ask(questions, progress, num, input, print, rng, numeric=not topics)
    print(f"\n{right} of {asked} right")
