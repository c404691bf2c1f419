"""The quiz asks what was missed first, and remembers it through damage."""

import json
from random import Random

from minipar.learn.exercises.problems import PROBLEMS
from minipar.learn.quiz.ask import NUMERIC_EVERY, ask, without_terminal
from minipar.learn.quiz.book import questions_on
from minipar.learn.quiz.progress import Progress


class Typist:
    """Answers prompts from a list, and keeps what was shown."""

    def __init__(self, *lines):
        self.lines, self.shown = list(lines), []

    def read(self, prompt):
        self.shown.append(prompt)
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    def show(self, text):
        self.shown.append(text)


def quiz(path, typist, num=2, topics=("mesh",), numeric=False, seed=0):
    return ask(questions_on(topics), Progress(path), num, typist.read, typist.show, Random(seed), numeric)


def test_what_was_missed_is_asked_first_the_next_time(tmp_path):
    path = tmp_path / "data" / "quiz.json"
    first = Typist("", "y", "", "n")
    assert quiz(path, first) == (1, 2)
    (missed,) = [name for name, entry in json.loads(path.read_text()).items() if entry["missed"]]
    again = Typist("", "maybe", "y")
    assert quiz(path, again, num=1, seed=3) == (1, 1)
    (question,) = [q for q in questions_on(["mesh"]) if q.id == missed]
    assert question.question[:40] in again.shown[1].replace("\n", " ")
    assert Progress(path).missed(missed) == 0
    assert Progress(path).asked(missed) == 2


def test_the_end_of_the_input_ends_the_quiz_and_loses_nothing(tmp_path):
    assert quiz(tmp_path / "quiz.json", Typist("", "y", ""), num=5) == (1, 1)
    assert len(json.loads((tmp_path / "quiz.json").read_text())) == 1


def test_a_numeric_question_is_judged_by_its_own_numbers(tmp_path):
    for seed in range(5):
        spoken = ["", "y"] * (NUMERIC_EVERY - 1)
        probe = Typist(*spoken, "nothing")
        assert quiz(tmp_path / f"{seed}-no.json", probe, NUMERIC_EVERY, (), True, seed) == (3, 4)
        (told,) = [line for line in probe.shown if line.strip().startswith("No: ")]
        answer = told.split()[1]
        right = Typist(*spoken, answer)
        assert quiz(tmp_path / f"{seed}.json", right, NUMERIC_EVERY, (), True, seed) == (4, 4)
    assert len(PROBLEMS) >= 10  # tests/learn/exercises/test_cards.py holds each answer to its worked line


def test_a_damaged_record_is_left_alone_and_said(tmp_path):
    path = tmp_path / "quiz.json"
    for damage in ("{", "[1, 2]", '{"rank": 3}'):
        path.write_text(damage)
        progress = Progress(path)
        assert "cannot be read" in progress.problem
        progress.record("rank", False)
        assert path.read_text() == damage
        assert json.loads(progress.path.read_text())["rank"] == {"asked": 1, "missed": 1}


def test_a_record_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    progress = Progress(tmp_path / "file" / "quiz.json")
    progress.record("rank", True)
    assert "cannot be" in progress.problem


def test_without_a_terminal_questions_and_answers_are_printed():
    text = without_terminal(questions_on(["zero"]), 2)
    assert text.count("Trap:") == 2
