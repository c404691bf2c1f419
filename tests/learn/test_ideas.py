"""The map of ideas: each entry exists, and the places made from it say what it says."""

import json
from importlib import import_module
from pathlib import Path

import pytest

import minipar
from minipar.cli import main
from minipar.learn.exercises.registry import EXERCISES
from minipar.learn.ideas import ideas, lesson_file, lesson_head, readme_table, with_head, with_table
from minipar.learn.museum.gallery import GALLERY
from minipar.learn.puzzles.registry import PUZZLES
from minipar.learn.quiz.book import topics
from minipar.spec import SPECIFICATIONS

ROOT = Path(__file__).parents[2]
IDEAS = list(ideas().values())
NAMES = {exercise.name for exercise in EXERCISES}


def named(path: str) -> object:
    """The object of a dotted name, through modules as far as there are some."""
    owner, _, name = path.rpartition(".")
    return getattr(import_module(owner), name)


@pytest.mark.parametrize("idea", IDEAS, ids=lambda idea: idea.name)
def test_all_that_hangs_on_an_idea_exists(idea):
    assert all((Path(minipar.__file__).parent / "simple" / name).is_file() for name in idea.floor)
    assert all(callable(named(name)) for name in idea.library)
    assert all(lesson_file(ROOT, number).is_file() for number in idea.lessons)
    for names, known in (
        (idea.spec, SPECIFICATIONS),
        (idea.exercises, NAMES),
        (idea.puzzles, PUZZLES),
        (idea.exhibits, {exhibit.name for exhibit in GALLERY}),
        (idea.topics, topics()),
    ):
        assert set(names) <= set(known)


def test_everything_hangs_on_an_idea():
    """Each specification, exercise, puzzle, topic and lesson; and each has one home among the specifications."""
    for field, known in {
        "spec": SPECIFICATIONS,
        "exercises": NAMES,
        "puzzles": PUZZLES,
        "topics": topics(),
        "lessons": {path.name[:2] for path in (ROOT / "lessons").glob("[0-9]*.ipynb")},
    }.items():
        assert {name for idea in IDEAS for name in getattr(idea, field)} == set(known), field
    assert len(IDEAS) == 12


def test_readme_has_the_table():
    text = (ROOT / "README.md").read_text()
    assert text == with_table(text, readme_table(ROOT)), "run python -m minipar.learn.ideas"


def test_each_lesson_begins_with_its_idea():
    for path in (ROOT / "lessons").glob("[0-9]*.ipynb"):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        head = lesson_head(path.name[:2])
        assert head in first
        assert first == with_head(first, head), "run python -m minipar.learn.ideas"


def test_the_command_says_where_an_idea_is(capsys):
    main(["ideas", "zero3"])
    said = capsys.readouterr().out
    assert "minipar/simple/fsdp.py" in said
    assert "minipar.FSDP" in said
    main(["ideas"])
    assert all(idea.question in said for said in [capsys.readouterr().out] for idea in IDEAS)
    with pytest.raises(SystemExit, match="2"):
        main(["ideas", "zero4"])
    assert "did you mean zero" in capsys.readouterr().err
