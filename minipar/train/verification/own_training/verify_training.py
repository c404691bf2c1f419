"""`verify_training`: a training of the caller's own, by any library, on a mesh and in one process, compared."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from math import prod
from pathlib import Path
from typing import Any, Unpack, cast

from minipar.comm import Comm
from minipar.comm.objects import all_gather_objects, broadcast_object
from minipar.config.mesh_rules import MeshSizes, check_mesh
from minipar.mesh import Mesh
from minipar.runtime.launch import run, shutdown, surrounding_world
from minipar.spec.from_file import FromFile
from minipar.support.errors import require_positive
from minipar.train.verification.own_training.judge import OneProcess, TrainingVerification, first_apart, judge
from minipar.train.verification.own_training.watch import (
    Interrupted,
    Recorded,
    Setup,
    interrupted,
    record,
)


def verify_training(
    setup: Setup | str,
    *,
    steps: int = 3,
    backend: str | None = None,
    timeout_s: float = 60.0,
    **sizes: Unpack[MeshSizes],
) -> TrainingVerification:
    """Train on a mesh and in one process, by the caller's own code, and compare losses, gradients and weights.

    setup      `setup(world, mesh) -> (model, optimizer, step)`, or "FILE.py:NAME" or "PACKAGE.MODULE:NAME". It seeds,
               builds, cuts and wraps, with any library. `world` is a Comm; in one process it is None, and the mesh is of 1
    step       `step(k)` or `step()`: trains on the k-th batch, of which a rank takes its part, and returns the loss of the
               batch, or of the rank's part of it, or None
    model      a module, or several: a pipeline's stages. `optimizer`: one, or several
    timeout_s  how long one wait, `setup` or one step may take
    sizes      those of the mesh: dp=2, tp=2

    With five values, `(model, optimizer, step, save, load)`, it also saves after half the steps by `save(folder)`, sets up
    anew, loads by `load(folder)`, and compares the rest with the run that wasn't interrupted.

    A parameter's part is known by its Placement, DTensor or name, in torch's FSDP too; else it is found by its first
    values. The gradients compared are those with which the optimizer steps. A difference may be 1e-9 of a tensor's largest
    entry in float64, 1e-4 in float32, 3e-2 below, and 32 times what a last bit of the initial weights changes in one
    process: float64 sees most. torch's default process group has the world's ranks, for other libraries' wrappers.

    In a process of torchrun's, or of a default process group that the caller has made, the world is that one: every rank
    calls it, and gets the same result. One process's run is then made by rank 0, in a process of its own.

    Runs the training three times in one process and once on the mesh, and twice more where it saves. It can't see batches
    made outside `step`, or what a step does after its optimizer's last step and before it returns.
    Raises ValueError, in one line, if `setup` fails or doesn't end in one process, returns something else, or differs
    between two calls; RankError if a rank fails or waits for ever.
    """
    require_positive(steps=steps, **sizes)
    subject = _subject(setup)
    dense = [n for axis, n in cast(dict[str, int], sizes).items() if axis != "ep"]
    mesh = Mesh(prod(dense), **sizes)
    world = surrounding_world(backend)
    if world is not None:
        check_mesh(world.size, **sizes)
        return _among_ranks(world, mesh, sizes, subject, steps, timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        one = _one_process(subject, steps, timeout_s)
        shutdown()  # the default process group of the next pool has the mesh's ranks
        try:
            ranks = run(
                _on_rank, sizes, subject, _stepped(one), timeout_s, folder,
                world_size=mesh.world_size, backend=backend, timeout_s=timeout_s,
            )  # fmt: skip
        finally:
            shutdown()  # what the caller's code leaves in a process
    return judge(mesh, one, ranks)


def _subject(setup: Setup | str) -> Setup | FromFile:
    if not isinstance(setup, str):
        if not callable(setup):
            raise ValueError(f"setup={setup!r} is no function of (world, mesh), and no FILE.py:NAME")
        return setup
    place, _, name = setup.partition(":")
    if not name:
        raise ValueError(f"setup={setup!r} names no function; give FILE.py:NAME or PACKAGE.MODULE:NAME")
    if place.endswith(".py"):
        if not os.path.isfile(place):
            raise ValueError(f"setup={setup!r}: there is no file {place}")
        if not re.search(rf"\b{name}\b", Path(place).read_text()):
            raise ValueError(f"setup={setup!r}: {place} defines no {name}")
        place = os.path.abspath(place)
    return FromFile(place, (name,))


def _one_process(subject: Setup | FromFile, steps: int, limit_s: float) -> OneProcess:
    with tempfile.TemporaryDirectory() as folder:
        shutdown()  # so that the default process group has one rank
        made: OneProcess | str = run(
            _alone, subject, steps, limit_s, folder, world_size=1, timeout_s=limit_s
        )[0]
    if isinstance(made, str):
        raise ValueError(made)
    return made


def _alone(
    world: Comm, subject: Setup | FromFile, steps: int, limit_s: float, folder: str
) -> OneProcess | str:
    """Return one process's run, or why it can't be a reference."""
    one = subject, None, Mesh(world), steps, limit_s
    try:
        first, forgetful = record(*one), record(*one, forget=True)
        what = _first_difference(first, forgetful)
        # What zeroed gradients change later on is no other training, unless it is the weights.
        late = what is not None and not what.endswith(("initial weights", "step 0"))
        sums = late and any(
            first_apart(x.weights, y.weights, exact=True) for x, y in zip(first.steps, forgetful.steps)
        )
        if late:
            what = _first_difference(first, record(*one)) if sums else None
        if what:
            calls = "setup(None, mesh) differs between two calls in one process"
            return f"{calls}, first in {what}: seed and build inside setup"
        nudged = record(*one, nudge=True)
        return OneProcess(first, nudged, interrupted(*one, folder) if first.saves else None, sums)
    except ValueError as error:
        return str(error)


def _stepped(one: OneProcess) -> list[bool]:
    return [step.stepped for step in one.run.steps]


def _on_rank(
    world: Comm, sizes: MeshSizes, subject: Setup | FromFile, stepped: list[bool], limit_s: float, folder: str
) -> tuple[Recorded, Interrupted | None]:
    mine = subject, world, Mesh(world, **sizes), len(stepped), limit_s
    recorded = record(*mine, stepped=stepped)
    return recorded, interrupted(*mine, folder) if recorded.saves else None


def _among_ranks(
    world: Comm, mesh: Mesh, sizes: MeshSizes, subject: Setup | FromFile, steps: int, limit_s: float
) -> TrainingVerification:
    """Every rank of somebody else's world calls this, and gets the same result."""
    made: Any = None
    if world.rank == 0:
        try:
            made = _one_process(subject, steps, limit_s), tempfile.mkdtemp()
        except Exception as error:
            made = error
    made = broadcast_object(world, made)
    if isinstance(made, Exception):
        raise made
    one, folder = made
    try:
        ranks = all_gather_objects(world, _on_rank(world, sizes, subject, _stepped(one), limit_s, folder))
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return judge(mesh, one, ranks)


def _first_difference(a: Recorded, b: Recorded) -> str | None:
    """Return what two runs in one process first differ in, bit for bit."""
    if first_apart(a.initial, b.initial, exact=True):
        return "the initial weights"
    for number, (x, y) in enumerate(zip(a.steps, b.steps)):
        if x.loss != y.loss and not (x.loss != x.loss and y.loss != y.loss):
            return f"the loss of step {number}"
        for what in ("gradients", "weights"):
            if name := first_apart(getattr(x, what), getattr(y, what), exact=True):
                return f"the {what} of {name} in step {number}"
    return None
