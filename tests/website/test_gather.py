"""Links of the texts that the site takes from the checkout: each leads to a page that the site has."""

import re
from pathlib import Path

import pytest

from minipar.learn.puzzles.registry import PUZZLES
from website import gather
from website.explorables import EXPLORABLES, explorable
from website.gather import LINK, PLACES, ROOT, relinked
from website.lesson_pictures import Field, Recording
from website.recorded import sizes_of

COPIED = {
    **PLACES,
    **{
        file.relative_to(ROOT).as_posix(): file.relative_to(ROOT).with_suffix(".md").as_posix()
        for pattern in ("*.md", "*.ipynb")
        for file in (ROOT / "lessons").rglob(pattern)
        if ".ipynb_checkpoints" not in file.parts
    },
}


@pytest.mark.parametrize("source", [name for name in COPIED if name.endswith(".md")])
def test_a_text_links_only_to_pages_that_the_site_has(source):
    pages = set(COPIED.values())
    here = Path("/") / COPIED[source]
    text = relinked((ROOT / source).read_text(encoding="utf-8"), ROOT / source, COPIED[source])
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = [found[2] for found in LINK.finditer(text) if "://" not in found[2]]
    landed = {(here.parent / target).resolve().relative_to("/").as_posix() for target in targets}
    assert {name for name in landed if name.endswith(".md")} <= pages


def test_what_the_site_has_not_is_named_without_a_link():
    said = relinked("see [the engine](../minipar/inference/engine.py)", ROOT / "docs" / "use.md", "use.md")
    assert said == "see the engine (`minipar/inference/engine.py`)"


def test_the_home_page_says_how_much_there_is():
    text = gather._with_numbers((ROOT / "website" / "pages" / "home.md").read_text(encoding="utf-8"))
    assert "NUM_" not in text
    assert "_OPTIONS" not in text
    lessons = len(list((ROOT / "lessons").glob("[0-9]*.ipynb")))
    assert f"[{lessons} lessons](lessons/README.md)" in text


@pytest.mark.parametrize("number", EXPLORABLES)
def test_a_lessons_explorable_leads_to_a_page_with_these_settings(number, monkeypatch):
    one = EXPLORABLES[number]
    text = (ROOT / "website" / "pages" / f"{one.page}.md").read_text(encoding="utf-8")
    assert {name for name in one.settings if f'name="{name}"' not in text} == set()
    if "puzzle" in one.settings:
        assert PUZZLES[one.settings["puzzle"]].lesson == number
    if "p" in one.settings and "collective" in one.settings:
        assert one.settings["p"] in sizes_of(one.settings["collective"])
    empty = Recording("pipeline", (Field("schedule", "schedule", ("1f1b", "zb-h1"), is_menu=True),), {})
    monkeypatch.setitem(EXPLORABLES, number, one._replace(recording=lambda: empty))
    text = "# A lesson\n\n```python\nimport torch\n```\n\n## First\n\n## Your turn\n\n`minipar exercise start ddp`\n"
    said = explorable(number, text)
    assert said.index(f"interactive/{one.page}.html") < said.index("<details") < said.index("import torch")
    assert said.index("import torch") < said.index("</details>") < said.index("## First")
    assert "[`minipar exercise start ddp`](../exercises.md#ddp)" in said


def test_every_lesson_that_has_something_to_move_has_an_explorable():
    assert set(EXPLORABLES) >= {"01", "02", "03", "06", "07", "08", "09", "10", "12", "17"}


def test_a_first_cell_that_does_more_than_import_is_not_folded():
    text = "# A lesson\n\n```python\nprint(1)\n```\n"
    assert explorable("05", text) == text
