from pathlib import Path

import pytest

import minipar
from website.public_names import page

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "api.md"


def test_the_page_is_that_of_the_names_exported_now():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run: python -m website.public_names docs/generated/api.md"
    )


def test_every_name_has_words_of_its_own():
    rows = [line.split(" | ") for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    for name, words in rows:
        assert len(words.split()) > 2, name
        assert not words.startswith(name.strip("|` ") + "("), name


def test_a_new_public_name_is_missed_on_the_page(monkeypatch):
    """Planted: a name that nobody wrote down."""
    monkeypatch.setattr(minipar, "__all__", [*minipar.__all__, "new_name"])
    monkeypatch.setattr(minipar, "new_name", page, raising=False)
    with pytest.raises(AssertionError, match="website.public_names"):
        test_the_page_is_that_of_the_names_exported_now()
