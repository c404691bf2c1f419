"""tests/survivors.toml: each explained mutant is of a line that its file still has."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SURVIVORS = tomllib.loads((ROOT / "tests" / "survivors.toml").read_text())["survivor"]


def test_every_explained_mutant_changes_a_line_that_is_still_there():
    for row in SURVIVORS:
        lines = (ROOT / row["file"]).read_text().splitlines()
        assert row["line"] in " ".join(line.strip() for line in lines), (
            f"{row['file']} has no more: {row['line']}"
        )
        assert row["mutant"] != row["line"]


def test_every_explanation_says_why_and_stands_once():
    assert all(len(row["why"]) > 20 and row["why"].endswith(".") for row in SURVIVORS)
    keys = [(row["file"], row["line"], row["mutant"]) for row in SURVIVORS]
    assert len(keys) == len(set(keys))
