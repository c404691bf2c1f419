"""Side by side with torch's own, as ratios: `python -m benchmarks [name ...]`, or `minipar bench`.

harness.py      two contenders in one run, and the table
collectives.py  and the rest: each a module with `rows(quick)`, and its title as docstring
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from benchmarks.harness import print_table
from minipar.errors import one_of

NAMES = tuple(
    name
    for name in (
        "collectives",
        "data_parallel",
        "zero",
        "tensor_parallel",
        "pipeline",
        "expert",
        "context",
        "mesh",
    )
    if find_spec(f"benchmarks.{name}")
)


def run(names=None, quick: bool = False) -> None:
    """Print the tables of these modules, or of all. Raises ValueError for a name that is none of theirs."""
    for name in names or NAMES:
        if name not in NAMES:
            raise ValueError(f"names={name!r} is no benchmark; use {one_of(NAMES)}")
    for name in names or NAMES:
        module = import_module(f"benchmarks.{name}")
        print_table(module.__doc__.splitlines()[0], module.rows(quick))
