"""The source of a solution, and of the definitions that it uses from the same module, read from the library's files."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from minipar.learn.exercises.registry import Exercise

PACKAGE = Path(__file__).parents[2]


def solution_text(exercise: Exercise) -> str:
    """Return the solution's file, line and source, with the definitions it uses, in the file's order."""
    wanted: dict[str, set[str]] = {}
    for place in exercise.solution.values():
        module, _, name = place.partition(":")
        wanted.setdefault(module, set()).add(name)
    return "\n\n".join(excerpt(module, names) for module, names in wanted.items())


def excerpt(module: str, names: set[str], with_used: bool = True) -> str:
    """Return the source of these names and, with `with_used`, of the definitions that they use from their module."""
    file = Path(_home(module, names))
    source = file.read_text()
    body = {}
    for node in ast.parse(source).body:
        targets = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        for name in [node.name] if hasattr(node, "name") else targets:
            body[name] = node
    used: set[str] = set()
    todo = set(names)
    while todo:
        name = todo.pop()
        used.add(name)
        if not with_used:
            continue
        todo |= {n.id for n in ast.walk(body[name]) if isinstance(n, ast.Name)} & set(body) - used
    lines = source.splitlines()
    nodes = sorted({id(body[n]): body[n] for n in used}.values(), key=lambda node: node.lineno)
    pieces = ["\n".join(lines[_first_line(node) - 1 : node.end_lineno]) for node in nodes]
    where = f"# {file.relative_to(PACKAGE.parent).as_posix()}, from line {_first_line(nodes[0])}"
    return "\n\n\n".join([where, *pieces])


def _home(module: str, names: set[str]) -> str:
    """Return the file that defines the names: the module's or, for a package, the file from which it imports them."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    file = spec.origin
    for node in ast.parse(Path(file).read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and names & {alias.name for alias in node.names}:
            return _home(node.module, names)
    return file


def _first_line(node: ast.stmt) -> int:
    lines: list[int] = [part.lineno for part in (node, *getattr(node, "decorator_list", []))]
    return min(lines)
