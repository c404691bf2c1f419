"""docs/generated/api.md: every public name with the first sentence of its docstring, and how stable it is.

python -m website.public_names docs/generated/api.md
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import minipar
from minipar.support.registry import Kind

# A name that several rooms export is listed in the first of them.
ROOMS = (
    "comm", "mesh", "config", "model", "data_parallel", "tensor_parallel", "schedules", "pipeline", "expert",
    "context", "spec", "cost", "train", "train.verification", "inference",
)  # fmt: skip

LEVELS = {
    "stable": (
        "what `minipar` and `minipar.spec` export; commands, and the flags that their `--help` shows; a run's "
        "`config.toml`, `metrics.jsonl` and checkpoints; the kinds of `minipar.support.registry`, by which packages bring "
        "extras",
        "only with a new major version; what will go warns for one minor version before",
    ),
    "provisional": (
        "what the rooms below export; options of extras; the files of the ground floor",
        "with a minor version; the changelog says it",
    ),
    "internal": ("every other module and name", "at any time"),
}
HEAD = [
    "# Public names",
    "",
    "| level | what it covers | when it may change |",
    "|---|---|---|",
    *(f"| **{level}** | {covers} | {changes} |" for level, (covers, changes) in LEVELS.items()),
    "",
    "Versions follow [Semantic Versioning](https://semver.org). `help(minipar.DDP)`, or the API pages of the site, tell",
    "each name's shapes, cost and errors.",
    "",
]


def page() -> str:
    parts, listed = [*HEAD], set()
    for module in (minipar, *(import_module(f"minipar.{room}") for room in ROOMS)):
        level = "stable" if module.__name__ in {"minipar", "minipar.spec"} else "provisional"
        names = {name: getattr(module, name) for name in sorted(module.__all__) if name not in listed}
        names = {name: value for name, value in names.items() if not isinstance(value, ModuleType)}
        parts += _table(module.__name__, level, names)
        listed |= set(names)
    return "\n".join(parts)


def _table(module: str, level: str, names: dict[str, Any]) -> list[str]:
    rows = [f"| `{name}` | {_first_sentence(value)} |" for name, value in names.items()]
    return [f"## {module}: {level}", "", "| name | |", "|---|---|", *rows, ""]


def _first_sentence(value: Any) -> str:
    """Return it from the docstring; a constant says its value, a table its keys, a kind of choice minipar's own."""
    if isinstance(value, int):
        return f"the number {value}"
    if isinstance(value, Kind):  # which names extras add depends on the packages that are installed
        return f"a table of {len(value.own)}: {', '.join(value.own)}; and those of installed extras"
    if isinstance(value, Mapping):
        return f"a table of {len(value)}: {', '.join(map(str, value))}"
    if not callable(value):
        return f"a `{type(value).__name__}`"
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])|:$", paragraph)[0].replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
