"""docs/extras.md tells the truth: its table is what minipar declares."""

import dataclasses
import re
import tomllib
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extras.md").read_text()
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["minipar.extras"]


def declared_row(name: str, place: str) -> str:
    """The first three cells of a choice's row."""
    module, _, attribute = place.partition(":")
    options = getattr(import_module(module), attribute).options
    fields = () if options is None else dataclasses.fields(options)
    return (
        f"| `{module.split('.')[2]}` | `{name}` | {', '.join(f'`{f.name}`' for f in fields)}".rstrip() + " |"
    )


def test_the_table_is_what_is_declared():
    told = {
        re.match(r"\| `\w+` \| [^|]+ \|[^|]*\|", line)[0] for line in PAGE.splitlines() if line[:3] == "| `"
    }
    declared = {declared_row(name, place) for name, place in DECLARED.items()}
    assert sorted(declared - told) == []
    assert sorted(told - declared) == []


def test_every_folder_is_named():
    folders = {path.parent.name for path in (ROOT / "minipar" / "extras").glob("*/__init__.py")}
    assert {name for name in folders if f"`{name}`" not in PAGE} == set()
