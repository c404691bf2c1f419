"""The book's answers are short, different, and true: every number is computed, every proof is there."""

import ast
import json
import math
from pathlib import Path

import pytest

from minipar.quiz.boards import code_of, designs, walkthroughs
from minipar.quiz.book import as_entries, book, questions_on, topics
from minipar.quiz.pages import cells_of, pages
from minipar.schedules import one_f_one_b
from minipar.spec import SPECIFICATIONS

ROOT = Path(__file__).parent.parent.parent
BOOK = {question.id: question for question in book()}
NAMES = {"f": None, "ceil": math.ceil, "log": math.log, "sqrt": math.sqrt}


def test_the_book_has_each_question_once():
    assert len(book()) == len(BOOK) >= 130
    assert len({question.question for question in book()}) == len(book())
    assert {question.level for question in book()} == {1, 2, 3}


@pytest.mark.parametrize("name", BOOK)
def test_an_answer_can_be_spoken_and_its_numbers_are_so(name):
    question = BOOK[name]
    assert 40 <= len(question.answer.split()) <= 90
    assert question.follow_up.endswith("?")
    for shown, expression in question.shows.items():
        assert shown in question.answer
        value = eval(expression, dict(NAMES))
        assert value == shown or f"{value:g}" == shown, (shown, value)


def defined_in(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", BOOK)
def test_what_proves_an_answer_exists(name):
    kind, _, what = BOOK[name].proof.partition(" ")
    if kind == "lesson":
        path = ROOT / "lessons" / cells_of(ROOT / "lessons")[what]
        ids = (what, what[3:])
        (cell,) = [c for c in json.loads(path.read_text())["cells"] if c["id"] in ids]
        assert cell["cell_type"] == "code"
        assert "assert" in "".join(cell["source"])
    elif kind == "test":
        file, _, function = what.partition("::")
        assert function in defined_in(ROOT / file)
    else:
        assert kind == "floor"
        assert (ROOT / "minipar" / "simple" / f"{what}.py").exists()


def test_the_pages_are_those_of_the_book():
    folder = ROOT / "lessons" / "interview"
    written = pages(cells_of(ROOT / "lessons"))
    assert {path.name for path in folder.glob("*.md")} >= set(written)
    for name, text in written.items():
        assert (folder / name).read_text() == text, f"run: python -m minipar.quiz.pages {folder.name}"


def test_topics_are_found_by_name_and_others_refused_with_the_nearest():
    assert {q.topic for q in questions_on(["long-context", "zero"])} == {"long context", "zero"}
    assert len(questions_on([])) == len(book())
    with pytest.raises(ValueError, match="did you mean pipelines"):
        questions_on(["pipeline"])
    assert len(topics()) == len({q.topic for q in book()})


def test_flash_cards_have_all_that_a_learner_needs():
    for entry in as_entries(book()):
        assert {"question", "answer", "topic", "level", "proof", "follow_up", "trap"} <= entry.keys()
        json.dumps(entry)


def test_a_walkthrough_has_short_code_and_a_specification():
    assert len(walkthroughs()) == 10
    for board in walkthroughs():
        assert board["tests"] in SPECIFICATIONS
        assert 3 < len(code_of(board)) < 60
        assert len(board["derive"].split()) > 40
    (sketch,) = [board["sketch"] for board in walkthroughs() if board["title"] == "1F1B"]
    for rank, actions in enumerate(one_f_one_b(4, 6).actions):
        assert " ".join(f"{a.op}{a.microbatch}" for a in actions) in sketch, rank


def test_there_are_three_designs_with_the_questions_that_follow():
    assert len(designs()) == 3
    assert all(len(design["asks"]) == 3 for design in designs())
