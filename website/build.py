"""`make site`: gather the pages, run MkDocs, and add Python for the browser. Writes build/site."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import yaml

from website.gather import HERE, ROOT, gather

SITE = ROOT / "build" / "site"
PYODIDE, IFRAME_WORKER, AXE = "pyodide@314.0.7", "iframe-worker@1.0.4", "axe-core@4.14.1"  # npm packages
PYODIDE_FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)

FOREIGN_SHIM = "https://unpkg.com/iframe-worker/shim"
QUIET = os.environ | {"NO_MKDOCS_2_WARNING": "1"}


def build() -> Path:
    """Build the site; return its folder. Raises CalledProcessError where MkDocs or npm fails."""
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder) / "docs"
        print("gathering pages ...", flush=True)
        nav = gather(docs)
        _zip_library(docs / "assets" / "minipar.zip")
        (docs / "assets" / "pyodide").mkdir()
        for name in PYODIDE_FILES:
            (docs / "assets" / "pyodide" / name).write_bytes(from_npm(PYODIDE, name))
        config = (HERE / "mkdocs.yml").read_text(encoding="utf-8")
        for mark, value in {"DOCS_DIR": docs, "SITE_DIR": SITE, "PACKAGE_DIR": ROOT}.items():
            config = config.replace(mark, str(value))
        path = Path(folder) / "mkdocs.yml"
        path.write_text(config + yaml.safe_dump({"nav": nav}, sort_keys=False), encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", path], check=True, env=QUIET
        )
    _serve_shim_ourselves()
    weights = {file: file.stat().st_size for file in SITE.rglob("*") if file.is_file()}
    python = sum(
        size for file, size in weights.items() if "assets/pyodide" in file.as_posix() or file.suffix == ".zip"
    )
    print(
        f"wrote {SITE}: {sum(weights.values()) / 1e6:.0f} MB; "
        f"an interactive page loads {python / 1e6:.0f} MB of it as Python"
    )
    return SITE


def _zip_library(path: Path) -> None:
    """Pack the modules that the pages' answers import, found by importing them; none of them imports torch."""
    listed = subprocess.run(
        [sys.executable, "-c", LIST_MODULES], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in listed:
            archive.write(ROOT / file, file)
        stub = next(Path(place) for place in find_spec("lazy_loader").submodule_search_locations)
        for file in stub.glob("*.py"):
            archive.write(file, f"lazy_loader/{file.name}")


LIST_MODULES = """
import sys
from pathlib import Path
import website.answers
assert "torch" not in sys.modules and "numpy" not in sys.modules
for name in sorted(sys.modules):
    if name.split(".")[0] in ("minipar", "website"):
        file = Path(sys.modules[name].__file__)
        for beside in (file, file.with_suffix(".pyi")):
            if beside.exists():
                print(beside.relative_to(Path.cwd()))
"""


def from_npm(package: str, name: str) -> bytes:
    """Return a file of an npm package, which is fetched once and kept in build/npm."""
    kept = ROOT / "build" / "npm" / f"{package.replace('@', '-')}.tgz"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        print(f"fetching {package} ...", flush=True)
        if shutil.which("npm") is None:
            raise SystemExit("npm is not installed: it brings Pyodide, the Python of the interactive pages")
        subprocess.run(
            ["npm", "pack", "--silent", package], check=True, cwd=kept.parent, stdout=subprocess.DEVNULL
        )
    with tarfile.open(kept) as archive:
        return archive.extractfile(f"package/{name}").read()


def _serve_shim_ourselves() -> None:
    """Material's search from a folder asks a foreign host for a script: put it beside the pages instead."""
    (SITE / "assets" / "iframe-worker.js").write_bytes(from_npm(IFRAME_WORKER, "shim/index.js"))
    for page in SITE.rglob("*.html"):
        up = "../" * (len(page.relative_to(SITE).parts) - 1)
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(FOREIGN_SHIM, f"{up}assets/iframe-worker.js"), encoding="utf-8")


if __name__ == "__main__":
    build()
