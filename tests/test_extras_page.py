"""docs/extras.md tells the truth: its table is what minipar declares, and its example works as it stands there."""

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

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


@pytest.mark.thorough
def test_the_example_of_a_schedule_is_verified(tmp_path):
    """As an installed package: the module of the page, and the entry point of its pyproject.toml."""
    module, project = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.S)[1] for kind in ("python", "toml"))
    (tmp_path / "last_first.py").write_text(module)
    ((name, place),) = tomllib.loads(project)["project"]["entry-points"]["minipar.extras"].items()
    info = tmp_path / "last_first-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: last-first\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[minipar.extras]\n{name} = {place}\n")
    code = (
        "from dataclasses import replace; from minipar.config import VERIFY_DEFAULTS; "
        "from minipar.train.verification import verify; "
        "result = verify(replace(VERIFY_DEFAULTS, pp=2, microbatches=4, schedule='last-first', steps=2)); "
        "print(result.equal, result.config.choice('schedule').help)"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout.split("\n")[0] == "True gpipe backwards", done.stderr
