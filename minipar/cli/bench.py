"""`minipar bench`: the checkout's own benchmarks."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

import sys
from functools import partial
from pathlib import Path

import tyro

import minipar
from minipar.cli.parse import Work


def bench_command(names: tyro.conf.Positional[tuple[str, ...]] = (), quick: bool = False) -> Work:
    """Time minipar against torch's own implementations in the same run, and print tables of the ratios.

    Args:
        names: the tables to print, such as collectives, zero, pipeline or training; all if none are given.
        quick: use fewer repetitions and sizes.
    """
    return partial(_bench, names, quick)


def _bench(names: tuple[str, ...], quick: bool) -> None:
    checkout = Path(minipar.__file__).resolve().parents[1]
    if not (checkout / "benchmarks" / "__init__.py").is_file():
        raise ValueError(
            "the benchmarks are not installed with minipar; unpack its source distribution (pip download --no-deps "
            "--no-binary minipar minipar) or clone the project, and run `make bench` there"
        )
    sys.path.insert(0, str(checkout))  # before the current folder, which may have another `benchmarks`
    import benchmarks

    benchmarks.run(names or None, quick=quick)
