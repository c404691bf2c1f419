"""`make site`: gather the pages, run MkDocs, and add Python for the browser. Writes build/site."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import yaml

from website.bundle import write_bundle
from website.gather import HERE, ROOT, gather

SITE = ROOT / "build" / "site"
# npm packages
PYODIDE, IFRAME_WORKER, AXE = "pyodide@314.0.7", "iframe-worker@1.0.4", "axe-core@4.14.1"
SERIF = "@fontsource/source-serif-4@5.3.1"
PYODIDE_FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)

# The theme gives its search's dialog no name, which a screen reader needs.
DIALOG = 'data-md-component="search" role="dialog"'
FOREIGN_SHIM = "https://unpkg.com/iframe-worker/shim"
HIGHLIGHT = re.compile(r'<div class="([^"]*)highlight">(.*?)</div>', re.DOTALL)
SHEET = re.compile(r'<link rel="stylesheet" href="((?:\.\./)*|/)(assets/[^"]+\.css)">\s*')
PICTURE = re.compile(r'(<img [^>]*src=")([^":]+\.(?:png|gif))"')
STYLE = "assets/style.css"  # all sheets in one: a page waits for a single one
QUIET = os.environ | {"NO_MKDOCS_2_WARNING": "1"}


def build() -> Path:
    """Build the site; return its folder. Exits with one line where npm is missing or fails, before anything is written.

    Raises CalledProcessError where MkDocs fails; an existing site then stays unchanged.
    """
    for package in (PYODIDE, IFRAME_WORKER, SERIF):
        packed(package)
    made = SITE.with_name("site.partial")
    shutil.rmtree(made, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder) / "docs"
        print("gathering pages ...", flush=True)
        nav = gather(docs)
        write_bundle(docs / "assets" / "minipar.zip")
        (docs / "assets" / "pyodide").mkdir()
        for name in PYODIDE_FILES:
            (docs / "assets" / "pyodide" / name).write_bytes(from_npm(PYODIDE, name))
        for name, kept in {
            "files/source-serif-4-latin-600-normal.woff2": ".woff2",
            "LICENSE": ".txt",
        }.items():
            (docs / "assets" / f"source-serif-4-600{kept}").write_bytes(from_npm(SERIF, name))
        config = (HERE / "mkdocs.yml").read_text(encoding="utf-8")
        for mark, value in {"DOCS_DIR": docs, "SITE_DIR": made, "PACKAGE_DIR": ROOT}.items():
            config = config.replace(mark, str(value))
        path = Path(folder) / "mkdocs.yml"
        path.write_text(config + yaml.safe_dump({"nav": nav}, sort_keys=False), encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", path], check=True, env=QUIET
        )
    _finish(made)
    shutil.rmtree(SITE, ignore_errors=True)
    made.rename(SITE)
    weights = {file: file.stat().st_size for file in SITE.rglob("*") if file.is_file()}
    python = sum(
        size for file, size in weights.items() if "assets/pyodide" in file.as_posix() or file.suffix == ".zip"
    )
    print(
        f"wrote {SITE}: {sum(weights.values()) / 1e6:.0f} MB; "
        f"an interactive page loads {python / 1e6:.0f} MB of it as Python"
    )
    return SITE


def from_npm(package: str, name: str) -> bytes:
    """Return a file of an npm package."""
    with tarfile.open(packed(package)) as archive:
        return archive.extractfile(f"package/{name}").read()


def packed(package: str) -> Path:
    """Return an npm package as a tar file, fetched once and kept in build/npm; exit with one line where that fails."""
    kept = ROOT / "build" / "npm" / f"{package.strip('@').replace('@', '-').replace('/', '-')}.tgz"
    if kept.exists():
        return kept
    if shutil.which("npm") is None:
        raise SystemExit("make site needs npm, which brings Pyodide, the Python of the interactive pages")
    kept.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {package} ...", flush=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as beside:
        done = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=beside, capture_output=True, text=True
        )
        if done.returncode or not list(Path(beside).glob("*.tgz")):
            said = (done.stderr.split("\n") + [""])[0] or f"npm exits with {done.returncode}"
            raise SystemExit(f"make site needs the package {package} from npm's registry, by network: {said}")
        (made,) = Path(beside).glob("*.tgz")
        made.replace(kept)
    return kept


def _finish(site: Path) -> None:
    """Finish the pages: local search, one sheet of style, sizes of pictures, first pictures, and the offline worker.

    Opened from a folder, pages would fetch that script from another host. Ours holds back the search's index. Pictures
    load when they come into view; with their size known, nothing jumps then.
    """
    (site / "assets" / "iframe-worker.js").write_bytes(from_npm(IFRAME_WORKER, "shim/index.js"))
    sheets: dict[str, None] = {}  # in their order, which is the same on all pages
    for page in sorted(site.rglob("*.html")):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        text = page.read_text(encoding="utf-8")
        ours = f'{up}assets/search.js"></script><script src="{up}assets/iframe-worker.js'
        text = text.replace(FOREIGN_SHIM, ours).replace(DIALOG, f'{DIALOG} aria-label="Search"')
        text = PICTURE.sub(partial(_sized, page.parent), text)
        text = HIGHLIGHT.sub(_with_lines, text)
        found = SHEET.findall(text)
        sheets |= dict.fromkeys(sheet for _, sheet in found)
        style = f'<link rel="stylesheet" href="{found[0][0]}{STYLE}"></head>'
        text = SHEET.sub("", text).replace("</head>", style, 1)
        page.write_text(text, encoding="utf-8")
    texts = [(site / sheet).read_text(encoding="utf-8").replace('@charset "UTF-8";', "") for sheet in sheets]
    (site / STYLE).write_text("\n".join(texts), encoding="utf-8")
    for sheet in sheets:
        (site / sheet).unlink()
    for name in ("sitemap.xml", "sitemap.xml.gz"):  # without an address there is nothing to list
        (site / name).unlink(missing_ok=True)
    pages = [
        page
        for page in sorted(site.rglob("*.html"))
        if 'type="application/json"' in page.read_text(encoding="utf-8")
    ]
    subprocess.run(["node", HERE / "prerender.mjs", *pages], check=True)
    _write_offline_worker(site)


def _write_offline_worker(site: Path) -> None:
    """Write the service worker, which keeps pages for reading without a network. The site's digest names its cache."""
    digest = hashlib.sha256()
    for file in sorted(site.rglob("*")):
        if file.is_file():
            digest.update(file.relative_to(site).as_posix().encode() + b"\0" + file.read_bytes())
    texts = [file.relative_to(site).as_posix() for file in sorted(site.rglob("*.html"))]
    scripts = [f"assets/{file.name}" for file in sorted((site / "assets").glob("*js"))]
    values = {
        "SITE_DIGEST": f"site-{digest.hexdigest()[:16]}",
        "PYODIDE_VERSION": f"python-{PYODIDE}",
        # Scripts first: they are few, and a lesson that is kept without them has a picture that does not move.
        "ALL_TEXTS": json.dumps(scripts + [name for name in texts if not name.startswith("api/")]),
    }
    text = (HERE / "offline-worker.js").read_text(encoding="utf-8")
    for mark, value in values.items():
        text = text.replace(mark, value)
    (site / "offline-worker.js").write_text(text, encoding="utf-8")


def _with_lines(found: re.Match) -> str:
    """Say how many lines a block of code has, so that a browser knows its height before it lays it out."""
    return f'<div class="{found[1]}highlight" style="--lines:{found[2].count(chr(10))}">{found[2]}</div>'


def _sized(folder: Path, found: re.Match) -> str:
    width, height = picture_size(folder / unquote(found[2]))
    return f'{found[1]}{found[2]}" loading="lazy" width="{width}" height="{height}"'


def picture_size(file: Path) -> tuple[int, int]:
    """Return width and height in pixels of a PNG or GIF, from its header."""
    head = file.read_bytes()[:24]
    return struct.unpack("<HH", head[6:10]) if head.startswith(b"GIF8") else struct.unpack(">II", head[16:24])


if __name__ == "__main__":
    build()
