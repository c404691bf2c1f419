"""The work of `minipar explore`: the built site, served on loopback and opened in a browser."""

from __future__ import annotations

import contextlib
import functools
import http.server
import webbrowser
from pathlib import Path
from typing import Any

BUILT = Path(__file__).resolve().parents[1] / "build" / "site"
FIRST_PAGE = "interactive/pipeline.html"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


def server(site: Path = BUILT, port: int = 0) -> http.server.ThreadingHTTPServer:
    """Return a server of the site on 127.0.0.1; port 0: any free port. Raises ValueError where the site is not built."""
    if site == BUILT and not (BUILT.parents[1] / "website").is_dir():
        raise ValueError(
            "the site is not installed with minipar; unpack its source distribution (pip download --no-deps "
            "--no-binary minipar minipar) or clone the project, run `make site` there, and give its build/site by --site"
        )
    if not (site / FIRST_PAGE).exists():
        raise ValueError(
            f"site={site} is not built; run `make site` in a checkout of minipar, or give --site"
        )
    try:
        return http.server.ThreadingHTTPServer(
            ("127.0.0.1", port), functools.partial(_Quiet, directory=str(site))
        )
    except (OSError, OverflowError) as error:
        raise ValueError(f"port={port} cannot be used: {error}; use another, or 0 for any free one") from None


def explore(site: Path | None = None, port: int = 0, browser: bool = True) -> None:
    """Serve the site until interrupted; open its first page unless `browser` is False."""
    with server(site or BUILT, port) as running:
        url = f"http://127.0.0.1:{running.server_port}/{FIRST_PAGE}"
        print(f"{url}   (end with ctrl-c)", flush=True)
        if browser:
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):
            running.serve_forever()
