"""minipar for the browser: a zip of the modules that the pages' answers import, none of which imports torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EPOCH = (1980, 1, 1, 0, 0, 0)  # of every file: the same sources give the same zip

# Load every extra, so that modules imported late are listed too.
LIST_MODULES = """
import sys
from pathlib import Path
import website.answers
from minipar.config.choices import CHOSEN
for kind in CHOSEN.values():
    kind.usable()
assert "torch" not in sys.modules and "numpy" not in sys.modules
for name in sorted(sys.modules):
    if name.split(".")[0] in ("minipar", "website"):
        file = Path(sys.modules[name].__file__)
        for beside in (file, file.with_suffix(".pyi")):
            if beside.exists():
                print(beside.relative_to(Path.cwd()))
"""


def write_bundle(path: Path) -> None:
    """Write the zip. Unpacked into a folder on sys.path, it is an installed package, and its extras are found by name."""
    listed = subprocess.run(
        [sys.executable, "-c", LIST_MODULES], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ).stdout.split()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        texts = {file: (ROOT / file).read_bytes() for file in listed}
        stub = next(Path(place) for place in find_spec("lazy_loader").submodule_search_locations)
        texts |= {f"lazy_loader/{file.name}": file.read_bytes() for file in sorted(stub.glob("*.py"))}
        for name, text in (texts | _metadata()).items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), text, zipfile.ZIP_DEFLATED)


def _metadata() -> dict[str, str]:
    """Return name -> text of the metadata files from which Python finds an installed package and its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    folder = f"{project['name']}-{project['version']}.dist-info"
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n",
        f"{folder}/entry_points.txt": "\n".join(lines),
    }
