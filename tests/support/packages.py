"""Packages of a stranger's, as pip would install them into a folder: a module, and metadata that name its extras."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import minipar

ROOT = Path(minipar.__file__).parents[1]


def install(folder: Path, package: str, extras: dict[str, str], **modules: str) -> None:
    """Make a package with these modules (`init` is its own) whose entry points of the group minipar.extras are `extras`."""
    (folder / package).mkdir(parents=True)
    for name, source in {"init": "", **modules}.items():
        file = "__init__.py" if name == "init" else f"{name}.py"
        (folder / package / file).write_text(dedent(source))
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}\n" for name, value in extras.items()]
    (metadata / "entry_points.txt").write_text("[minipar.extras]\n" + "".join(lines))


def run_with(folder: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run Python with the packages in this folder installed beside minipar."""
    path = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
