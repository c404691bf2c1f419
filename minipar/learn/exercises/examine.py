"""Examines a learner's file before the checks, for syntax errors, missing names and wrong signatures."""

from __future__ import annotations

import ast
import difflib
import inspect
import warnings
from pathlib import Path

from minipar.comm import Comm
from minipar.learn.exercises.folder import STUBS
from minipar.learn.exercises.registry import Exercise
from minipar.runtime.launch import run
from minipar.spec.all_specifications import SPECIFICATIONS
from minipar.spec.from_file import FromFile, deadline
from minipar.spec.specification import TIMEOUT_S, explained
from minipar.support.errors import RankError

# A stub's signature: its text, its positional parameters' names, and its keyword parameters' names.
Wanted = tuple[str, list[str], list[str]]


def find_fault(source: FromFile, exercise: Exercise) -> str | None:
    """Return a sentence that says why, and at which line, the learner's file cannot be checked; None if it can be."""
    if words := _syntax_fault(Path(source.path)):
        return words
    most_ranks = SPECIFICATIONS[exercise.specification].most_ranks
    run(_nothing, world_size=most_ranks)  # starts one pool of ranks, large enough for all later runs
    return _fault_on_a_rank(source, exercise)


def line_of(path: Path, name: str) -> int | None:
    """Return the line at which the file defines, assigns or imports `name` at its top level, if it does."""
    try:
        body = _parsed(path).body
    except (SyntaxError, ValueError, RecursionError, OSError):
        return None
    for node in body:
        names = {getattr(node, "name", None)}
        names |= {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        if name in names:
            return node.lineno
    return None


def at_line(path: Path, name: str) -> str:
    """Return, for example, "shift.py, line 14", or only the file's name if `name` is not at its top level."""
    line = line_of(path, name)
    return path.name if line is None else f"{path.name}, line {line}"


def _parsed(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns again when the learner's code runs
        return ast.parse(path.read_bytes(), str(path))


def _syntax_fault(path: Path) -> str | None:
    try:
        _parsed(path)
    except SyntaxError as error:
        text = f": {error.text.strip()}" if error.text else ""
        return f"{path.name}, line {error.lineno or 1}: {type(error).__name__}: {error.msg}{text}"
    except (ValueError, RecursionError) as error:
        return f"{path.name} cannot be read: {error}"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None


def _nothing(world: Comm) -> None:
    pass


def _fault_on_a_rank(source: FromFile, exercise: Exercise) -> str | None:
    try:
        fault: str | None = run(_examine, source, _wanted(exercise), world_size=1, timeout_s=TIMEOUT_S)[0]
        return fault
    except RankError as error:
        return explained(error).removeprefix("rank 0: ").removeprefix("rank 0 ")


def _wanted(exercise: Exercise) -> dict[str, Wanted]:
    """Return the stub's definitions by name."""
    wanted = {}
    for node in _parsed(STUBS / f"{exercise.name}.py").body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        function: ast.stmt = node
        kind = "def"
        if isinstance(node, ast.ClassDef):
            function, kind = next(f for f in node.body if getattr(f, "name", "") == "__init__"), "class"
        if isinstance(function, ast.FunctionDef):
            stub = f"{kind} {node.name}({ast.unparse(function.args).removeprefix('self, ')})"
            args = [a.arg for a in function.args.args if a.arg != "self"]
            positional = args[: len(args) - len(function.args.defaults)]
            by_name = args[len(positional) :] + [a.arg for a in function.args.kwonlyargs]
            wanted[node.name] = (stub, positional, by_name)
    return wanted


def _examine(world: Comm, source: FromFile, wanted: dict[str, Wanted]) -> str | None:
    path = Path(source.path)
    with deadline(source.limit_s):
        module = source.module()
    for name, (stub, positional, by_name) in wanted.items():
        if not hasattr(module, name):
            near = difflib.get_close_matches(name, vars(module), 1)
            meant = f"; did you mean it by {near[0]} ({at_line(path, near[0])})?" if near else ""
            return f"{path.name} defines no {name}: it should have `{stub}`{meant}"
        if words := _signature_fault(getattr(module, name), positional, by_name):
            return f"{at_line(path, name)}: {name} {words}; it should be `{stub}`"
    return None


def _signature_fault(function: object, positional: list[str], by_name: list[str]) -> str | None:
    if not callable(function):
        return f"is a {type(function).__name__}"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # a function written in C has no signature
    try:
        signature.bind(*positional, **dict.fromkeys(by_name))
    except TypeError as error:
        return f"cannot be called so: {error}"
    return None
