"""Links of the texts that the site takes from the checkout: each leads to a page that the site has."""

import re
from pathlib import Path

import pytest

from minipar.learn.puzzles.registry import PUZZLES
from minipar.schedules import make_schedule, simulate
from website import gather
from website.explorables import EXPLORABLES, explorable
from website.gather import LINK, PLACES, ROOT, relinked
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


def test_the_home_pages_pictures_are_the_simulators():
    recorded = gather.home_pictures()
    sizes = len(recorded["names"]) * len(recorded["p"]) * len(recorded["m"])
    assert len(recorded["answers"]) == sizes
    for name in recorded["names"]:
        timeline = simulate(make_schedule(name, 3, 8))
        answer = recorded["answers"][f"{name} 3 8"]
        assert answer["bubble_over_total"] == timeline.bubble_over_total
        assert answer["peak_live"] == list(timeline.peak_live)
        spans = [[list(timeline.spans[action]) for action in own] for own in timeline.schedule.actions]
        assert [[action[3:] for action in own] for own in answer["ranks"]] == spans


@pytest.mark.parametrize("number", EXPLORABLES)
def test_a_lessons_explorable_is_a_page_with_these_settings(number):
    _, page, settings = EXPLORABLES[number]
    text = (ROOT / "website" / "pages" / f"{page}.md").read_text(encoding="utf-8")
    assert {name for name in settings if f'name="{name}"' not in text} - {"program"} == set()
    if "puzzle" in settings:
        assert PUZZLES[settings["puzzle"]].lesson == number
    if "collective" in settings:
        assert settings["p"] in sizes_of(settings["collective"])
    text = "# A lesson\n\n```python\nimport torch\n```\n\n## First\n\n## Your turn\n\n`minipar exercise start ddp`\n"
    said = explorable(number, text, gather.home_pictures)
    assert said.index(f"interactive/{page}.md") < said.index("import torch")
    assert "[`minipar exercise start ddp`](../exercises.md#ddp)" in said
