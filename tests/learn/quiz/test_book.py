"""The book's answers are short, different, and true: every number is computed, every proof is there."""

import ast
import json
import math
import re
from pathlib import Path

import pytest

from benchmarks.guide.boards import SPOKEN, code_of, design_page, designs, services, walkthroughs
from benchmarks.guide.interview import cells_of, pages_of_questions
from minipar.learn.quiz.book import as_entries, book, questions_on, topics
from minipar.schedules import one_f_one_b
from minipar.spec import SPECIFICATIONS

ROOT = Path(__file__).parents[3]
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


def defined_in(file: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("name", BOOK)
def test_what_is_asked_next_is_answered_in_30_to_60_words(name):
    assert 30 <= len(BOOK[name].follow_up_answer.split()) <= 60


@pytest.mark.parametrize("name", BOOK)
def test_what_proves_an_answer_exists_and_contains_its_claim(name):
    kind, _, what = BOOK[name].proof.partition(" ")
    if kind == "lesson":
        path = ROOT / "lessons" / cells_of(ROOT / "lessons")[what]
        ids = (what, what[3:])
        (cell,) = [c for c in json.loads(path.read_text())["cells"] if c["id"] in ids]
        assert cell["cell_type"] == "code"
        code, printed = "".join(cell["source"]), "".join("".join(o.get("text", "")) for o in cell["outputs"])
        assert "assert" in code
        assert BOOK[name].claim
        assert BOOK[name].claim in code + printed
    elif kind == "test":
        file, _, function = what.partition("::")
        (code,) = [ast.unparse(node) for node in defined_in(ROOT / file) if node.name == function]
        assert BOOK[name].claim
        assert BOOK[name].claim in code
    elif kind == "source":
        assert re.search(r"arXiv:\d{4}\.\d{5}|documentation|\b20\d\d\b", what)
    else:
        assert kind == "floor"
        assert (ROOT / "minipar" / "simple" / f"{what}.py").exists()


PAGES = ROOT / "lessons" / "interview"
RENEW = "run: python -m benchmarks.guide.interview lessons/interview"


def test_the_pages_are_those_of_the_book():
    for name, text in pages_of_questions(cells_of(ROOT / "lessons")).items():
        assert (PAGES / name).read_text() == text, RENEW


@pytest.mark.thorough
def test_the_designs_are_spoken_with_the_planners_present_numbers():
    assert (PAGES / "system-designs.md").read_text() == design_page(), RENEW


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
    assert len(walkthroughs()) == 11
    for board in walkthroughs():
        file, _, test = board["tests"].partition("::")
        assert test in [node.name for node in defined_in(ROOT / file)] if test else file in SPECIFICATIONS
        assert 3 < len(code_of(board)) < 60
        assert len(board["derive"].split()) > 40
    (sketch,) = [board["sketch"] for board in walkthroughs() if board["title"] == "1F1B"]
    for rank, actions in enumerate(one_f_one_b(4, 6).actions):
        assert " ".join(f"{a.op}{a.microbatch}" for a in actions) in sketch, rank


def test_there_are_three_designs_with_the_questions_that_follow():
    assert len(designs()) == 3
    assert all(len(design["asks"]) == len(design["answers"]) == 3 for design in designs() + services())


@pytest.mark.parametrize("design", designs() + services(), ids=lambda design: design["title"])
def test_a_design_is_spoken_in_parts_before_its_table(design):
    assert all(20 <= len(design[part].split()) <= 130 for part in SPOKEN)
    page = (ROOT / "lessons" / "interview" / "system-designs.md").read_text()
    text = page.partition(f"## {design['title']}")[2].partition("```")[0]
    at = [text.index(f"**{title}.**") for title in SPOKEN.values()]
    assert at == sorted(at)
    assert "{" not in text


def test_designs_quote_the_plan():
    page = (ROOT / "lessons" / "interview" / "system-designs.md").read_text()
    for design, layout, seconds in zip(
        designs(),
        ("dp8-zero1-mb1", "dp4-pp4-tp4-zero1-mb1-1f1b", "pp32-cp64-tp8"),
        ("7.4 s", "156 s", "18.1 s"),
    ):
        spoken, table = page.partition(f"## {design['title']}")[2].split("```")[:2]
        assert f"{seconds}, give or take" in spoken
        first = table.partition("where time goes\n")[2].splitlines()[0]
        assert layout in first
        assert float(first.split()[0]) == pytest.approx(float(seconds[:-2]), rel=0.01)


def test_a_service_design_is_in_parts_and_quotes_the_planner():
    (service,) = services()
    assert all(20 <= len(service[part].split()) <= 110 for part in SPOKEN)
    page = (ROOT / "lessons" / "interview" / "system-designs.md").read_text()
    text = page.partition(service["title"])[2]
    spoken, table = text.split("By `minipar plan --serve`:")
    assert "Weights in 16 bits are 138 GB" in spoken
    assert "138.0 GB of each GPU" in table
    assert "77 requests being written" in spoken  # 2 replicas of 38.7
    assert re.search(r"^ +4 +2 +8 +38\.7 ", table, re.MULTILINE)
