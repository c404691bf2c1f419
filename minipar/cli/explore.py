"""`minipar explore`."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

from functools import partial
from pathlib import Path

from minipar.cli.parse import Work


def explore_command(site: Path | None = None, port: int = 0, browser: bool = True) -> Work:
    """Open the interactive site in a browser, served to this machine only: pipelines, planner, collectives and mesh.

    Args:
        site: the folder of a built site (build/site of this checkout if not given); `make site` builds it.
        port: the server's port on 127.0.0.1; 0 takes any free one.
        browser: open a browser; otherwise only print the address.
    """
    return partial(_explore, site, port, browser)


def _explore(site: Path | None, port: int, browser: bool) -> None:
    from minipar.visualize.explore import explore

    explore(site, port, browser)
