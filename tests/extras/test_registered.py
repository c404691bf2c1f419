"""Our extras as the core finds them: each entry point loads, and no module of the core names one."""

from __future__ import annotations

import ast
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from minipar.support.registry import GROUP, Choice

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
# `simple` points its readers to the library; the others may import extras.
BESIDE_THE_CORE = ("extras", "learn", "cli", "spec", "visualize", "simple")


def resolved(value: str):
    module, _, name = value.partition(":")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_an_entry_point_of_ours_loads(name):
    assert isinstance(resolved(ENTRY_POINTS[name]), Choice)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_what_a_choice_says_it_brings_is_there(name):
    choice = resolved(ENTRY_POINTS[name])
    if choice.implementation:
        assert resolved(choice.implementation) is not None
    else:
        assert callable(choice.build)  # a schedule is plain data: its choice makes it


def core_modules() -> list[Path]:
    rooms = [path for path in sorted((ROOT / "minipar").iterdir()) if path.name not in BESIDE_THE_CORE]
    return [module for room in rooms for module in ([room] if room.is_file() else sorted(room.rglob("*.py")))]


def without_docstrings(source: str) -> str:
    """Return the code of a module, without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def test_no_module_of_the_core_names_an_extra():
    sources = [path for path in core_modules() if path.suffix == ".py"]
    assert len(sources) > 100
    naming = []
    for path in sources:
        code = without_docstrings(path.read_text())
        if any(f"{GROUP}." in line for line in code.splitlines()):
            naming.append(str(path.relative_to(ROOT)))
    assert naming == []
