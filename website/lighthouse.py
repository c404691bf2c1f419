"""`make lighthouse`: what Lighthouse says of the built site, on a phone's network and processor as it simulates them.

Pages are served compressed, as hosts of static pages do. Times are simulated from measured ones: run it on an idle machine.
"""

from __future__ import annotations

import gzip
import http.server
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

from website.build import SITE
from website.gather import ROOT

LIGHTHOUSE = "lighthouse@13.5.0"
PAGES = ("index.html", "lessons/01_ring_all_reduce.html", "interactive/puzzles.html")
LEAST = 95
FLAGS = "--headless=new --no-sandbox --disable-gpu"
COMPRESSED = (".html", ".css", ".js", ".mjs", ".json", ".svg")


class Compressing(http.server.SimpleHTTPRequestHandler):
    """Serves texts gzipped."""

    def log_message(self, *args):
        pass

    def send_head(self):
        path = Path(self.translate_path(self.path))
        if not path.is_file() or path.suffix not in COMPRESSED:
            return super().send_head()
        body = gzip.compress(path.read_bytes(), 6)
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(path))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)


def program() -> Path:
    """Return Lighthouse's script, installed once into build/npm; exit with one line where that fails."""
    folder = ROOT / "build" / "npm" / LIGHTHOUSE.replace("@", "-")
    script = folder / "node_modules" / "lighthouse" / "cli" / "index.js"
    if not script.exists():
        print(f"fetching {LIGHTHOUSE} ...", flush=True)
        done = subprocess.run(
            ["npm", "install", "--silent", "--no-save", "--prefix", folder, LIGHTHOUSE],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"make lighthouse needs {LIGHTHOUSE} from npm's registry, by network")
    return script


def scores(url: str) -> dict[str, int]:
    """Return Lighthouse's scores of a page by category, of 100."""
    categories = "--only-categories=performance,accessibility,best-practices"
    done = subprocess.run(
        ["node", program(), url, "--quiet", "--output=json", categories, f"--chrome-flags={FLAGS}"],
        env=os.environ | {"CHROME_PATH": shutil.which("chromium") or ""},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(done.stdout)["categories"]
    return {name: round(100 * category["score"]) for name, category in found.items()}


def main() -> int:
    """Print the scores; return 1 where one is below LEAST."""
    if not (SITE / "index.html").exists():
        raise SystemExit("the site is not built: make site")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Compressing, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    least = 100
    for page in sys.argv[1:] or PAGES:
        found = scores(f"http://127.0.0.1:{server.server_port}/{page}")
        print(f"{page}: " + ", ".join(f"{name} {score}" for name, score in found.items()), flush=True)
        least = min(least, *found.values())
    server.shutdown()
    server.server_close()
    return int(least < LEAST)


if __name__ == "__main__":
    raise SystemExit(main())
