"""A learner's own small framework in ten steps; each is checked, and `python train.py` trains with the pieces so far.

The folder has one file per step, with the name of the file of `minipar.simple` that solves it. A file with a hole in it
(`raise NotImplementedError`) counts as not written, and the piece of minipar.simple is used instead. All written steps are
checked each time, to report a step that broke an earlier one.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from minipar.learn.exercises.folder import STUBS
from minipar.learn.exercises.registry import STEPS, Step
from minipar.runtime.launch import shutdown
from minipar.simple import comm as floor_comm
from minipar.simple import launch, train
from minipar.spec.all_specifications import SPECIFICATIONS
from minipar.spec.from_file import FromFile
from minipar.spec.own_comm import on_comm

FLOOR = "minipar.simple"
PROGRESS = "project.json"
STUB_OF = {
    "zero": "zero1", "vocab": "vocab_loss", "pipeline": "pipeline_step", "mesh": "mesh", "dispatch": "dispatch",
}  # fmt: skip
LARGEST_DIFFERENCE = 1e-10  # the largest difference allowed in a float64 weight after two steps
TIMEOUT_S = 600.0


def start(folder: Path) -> None:
    """Write the stub of every step that has no file yet into the folder. Raises ValueError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for step in STEPS:
            stub = f"{STUB_OF[step.file]}.py" if step.file in STUB_OF else f"project/{step.file}.py"
            if not (folder / f"{step.file}.py").exists():
                (folder / f"{step.file}.py").write_text((STUBS / stub).read_text())
    except OSError as error:
        raise ValueError(f"folder={folder} cannot be written: {error.strerror}") from None


def is_written(step: Step, folder: Path) -> bool:
    """Return whether the file exists and has no hole. A file that cannot be parsed counts as written; its check fails."""
    try:
        tree = ast.parse((folder / f"{step.file}.py").read_text())
    except OSError:
        return False
    except (SyntaxError, ValueError, RecursionError):
        return True
    return not any(isinstance(n, ast.Name) and n.id == "NotImplementedError" for n in ast.walk(tree))


def fault(step: Step, folder: Path, usable: dict[str, Step]) -> str | None:
    """Return a description of what is wrong with the step's pieces, or None.

    usable   file -> step, of the steps whose pieces are used together with this one
    """
    path = folder / f"{step.file}.py"
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"{path.name}, line {getattr(error, 'lineno', None) or 1}: {error}"
    names = {getattr(n, "name", None) for n in tree.body}
    names |= {t.id for n in tree.body for t in getattr(n, "targets", []) if isinstance(t, ast.Name)}
    names |= {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    if missing := [name for name in step.pieces if name not in names]:
        return f"{path.name} defines no {' and no '.join(missing)}"
    own = {**usable, step.file: step}
    for name, place in step.checks.items():
        report = SPECIFICATIONS[name].check(
            on_comm(_piece("comm:Comm", folder, own), _piece(place, folder, own))
        )
        if not report.ok:
            assert report.first_wrong is not None
            return f"{report.first_wrong.words} (specification {name}, stage {report.first_wrong.stage})"
    for words in step.meshes:
        try:
            apart = distance(
                folder, train.options([*words.split(), "--steps", "2"]), list(own.values()), _silent
            )
        except RuntimeError as error:
            return f"on {words}: {_last_line(str(error), path)}"
        if not apart < LARGEST_DIFFERENCE:
            return f"on {words}: after 2 steps a weight is {apart:.0e} from one process's"
    return None


def _piece(place: str, folder: Path, own: dict[str, Step]) -> Any:
    """Return the learner's piece if it is usable, else the piece of minipar.simple."""
    file, _, name = place.partition(":")
    if file in own and name in own[file].pieces:
        return FromFile(str((folder / f"{file}.py").resolve()), (name,))
    return getattr(import_module(f"{FLOOR}.{file}"), name)


def _last_line(words: str, path: Path) -> str:
    """Return the first and the last line of a rank's error, and the last line number of the learner's file in it."""
    lines = words.strip().splitlines()
    at = re.findall(rf'File ".*{re.escape(path.name)}", line (\d+)', words)
    return f"{lines[0]} {lines[-1]}" + (f" ({path.name}, line {at[-1]})" if at else "")


# Training with the learner's pieces -------------------------------------------------------------------------------------


def distance(folder: Path, args: Any, steps: list[Step], show: Callable[[str], None]) -> float:
    """Train on the mesh with the learner's pieces; return the largest difference of weights from a one-process run."""
    size = args.pp * args.dp * args.cp * args.tp
    places = [(step.file, step.pieces) for step in steps]
    ranks = launch.run(_compare, size, str(folder.resolve()), places, args, show, timeout_s=TIMEOUT_S)
    apart: float = ranks[0]
    return apart


def _compare(
    world: Any, folder: str, places: list[tuple[str, list[str]]], args: Any, show: Callable[[str], None]
) -> float:
    """On each rank: replace pieces of minipar.simple by the learner's, train, and compare with one process."""
    for file, pieces in places:
        module = FromFile(f"{folder}/{file}.py", tuple(pieces)).module()
        for name in pieces:
            replace(getattr(import_module(f"{FLOOR}.{file}"), name), getattr(module, name))
    apart: float = train.compare(floor_comm.Comm(world.ranks), args, show)
    return apart


def _silent(line: str) -> None:
    pass


def replace(old: Any, new: Any) -> None:
    """Put `new` in place of `old` wherever a module of minipar.simple, or of the learner, defines or imports it."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.startswith((f"{FLOOR}.", "exercise_")):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)


def main(file: str) -> None:
    """Train as the command line says, with the pieces in the file's folder; print the difference from one process."""
    folder, args = Path(file).parent, train.options()
    written = [step for step in STEPS if is_written(step, folder)]
    yours = ", ".join(step.file for step in written) or "nothing yet"
    print(f"yours: {yours}; the rest is of minipar.simple", flush=True)
    try:
        apart = distance(folder, args, written, print)
    except RuntimeError as error:
        raise SystemExit(f"{error}\n`minipar exercise project {folder}` says which piece is wrong") from None
    equal = "the weights of one process" if apart < LARGEST_DIFFERENCE else "NOT one process's weights"
    print(f"{equal}: the largest difference is {apart:.0e}")
    raise SystemExit(0 if apart < LARGEST_DIFFERENCE else 1)


# Checking ---------------------------------------------------------------------------------------------------------------


def check_project(folder: Path, show: Callable[[str], None]) -> bool:
    """Check every written step, in order; show a line for each of the ten steps. Return whether no check failed."""
    before = _progress(folder)
    usable: dict[str, Step] = {}
    states: dict[str, str] = {}
    try:
        for number, step in enumerate(STEPS, 1):
            title = f"{number:2} {step.file:16}"
            if not is_written(step, folder):
                states[step.file] = "to write"
                lost = "; it was green before" if before.get(step.file) == "green" else ""
                show(f"{title} to write, about {step.minutes} minutes: {step.title}{lost}")
                continue
            words = fault(step, folder, usable)
            states[step.file] = "green" if words is None else "red"
            if words is None:
                usable[step.file] = step
                show(f"{title} GREEN   {step.title}")
            else:
                lost = "it was green before; " if before.get(step.file) == "green" else ""
                show(f"{title} RED     {lost}{words}")
    finally:
        shutdown()
    (folder / PROGRESS).write_text(json.dumps(states, indent=1) + "\n")
    show(_what_next(folder, states))
    return "red" not in states.values()


def _what_next(folder: Path, states: dict[str, str]) -> str:
    green = sum(state == "green" for state in states.values())
    open_steps = [step for step in STEPS if states[step.file] != "green"]
    if not open_steps:
        return f"all {len(STEPS)} are green: `python {folder}/train.py` trains on 8 ranks with a framework of your own"
    step = open_steps[0]
    hints = "".join(f"; `minipar exercise hint {name} {folder}/{step.file}.py`" for name in step.hints)
    check = f"write {folder}/{step.file}.py, then check it with `minipar exercise project {folder}`"
    return f"{green} of {len(STEPS)} are green; next: {check}{hints}"


def _progress(folder: Path) -> dict[str, str]:
    try:
        progress = json.loads((folder / PROGRESS).read_text())
    except (OSError, ValueError):
        return {}
    return progress if isinstance(progress, dict) else {}
