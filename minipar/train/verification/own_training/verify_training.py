"""`verify_training`: a training of the caller's own, by any library, on a mesh and in one process, compared."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.objects import all_gather_objects, broadcast_object
from minipar.config.mesh_rules import check_mesh
from minipar.mesh import Mesh
from minipar.runtime.launch import run, shutdown, surrounding_world
from minipar.spec.from_file import FromFile
from minipar.support.errors import require_positive
from minipar.train.verification.own_training.judge import OneProcess, TrainingVerification, judge
from minipar.train.verification.own_training.watch import (
    Held,
    Interrupted,
    Recorded,
    Setup,
    Tensors,
    interrupted,
    record,
)


def verify_training(
    setup: Setup | str,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    steps: int = 3,
    backend: str | None = None,
    timeout_s: float = 60.0,
) -> TrainingVerification:
    """Train on a mesh and in one process, by the caller's own code, and compare losses, gradients and weights.

    setup      `setup(world, mesh) -> (model, optimizer, step)`, or "FILE.py:NAME" or "PACKAGE.MODULE:NAME". It seeds,
               builds, cuts and wraps, with any library. `world` is a Comm; in one process it is None, and the mesh is of 1
    step       `step(k)` or `step()`: trains on the k-th batch, of which a rank takes its part, and returns the loss of the
               batch, or of the rank's part of it, or None
    model      a module, or several: a pipeline's stages. `optimizer`: one, or several
    dp, ...    the sizes of the mesh
    timeout_s  how long one wait, `setup` or one step may take

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
    require_positive(steps=steps, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
    sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
    subject = _subject(setup)
    size = pp * dp * cp * tp
    Mesh(size, **sizes)
    world = surrounding_world(backend)
    if world is not None:
        return _among_ranks(world, subject, sizes, steps, timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        one = _one_process(subject, steps, timeout_s)
        shutdown()  # the default process group of the next pool has `size` ranks
        try:
            call = partial(run, world_size=size, backend=backend, timeout_s=timeout_s)
            ranks = call(_on_rank, subject, sizes, _stepped(one), timeout_s, folder)
        finally:
            shutdown()  # what the caller's code leaves in a process
    return judge(Mesh(size, **sizes), one, ranks)


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
    mesh = Mesh(world)
    try:
        first = record(subject, None, mesh, steps, limit_s)
        again = record(subject, None, mesh, steps, limit_s, forget=True)
        sums = False
        if what := _first_difference(first, again):
            sums = not what.endswith(("initial weights", "step 0")) and steps > 1
            if sums and not _trains_otherwise(first, again):
                what, sums = None, False
            if what and sums:
                sums = _first_difference(first, record(subject, None, mesh, steps, limit_s)) is None
            if what and not sums:
                calls = "setup(None, mesh) differs between two calls in one process"
                return f"{calls}, first in {what}: seed and build inside setup"
        nudged = record(subject, None, mesh, steps, limit_s, nudge=True)
        resumed = interrupted(subject, None, mesh, steps, limit_s, folder) if first.saves else None
    except ValueError as error:
        return str(error)
    return OneProcess(first, nudged, resumed, sums)


def _on_rank(
    world: Comm,
    subject: Setup | FromFile,
    sizes: dict[str, int],
    stepped: list[bool],
    limit_s: float,
    folder: str,
) -> tuple[Recorded, Interrupted | None]:
    mesh, steps = Mesh(world, **sizes), len(stepped)
    recorded = record(subject, world, mesh, steps, limit_s, stepped=stepped)
    return recorded, interrupted(subject, world, mesh, steps, limit_s, folder) if recorded.saves else None


def _among_ranks(
    world: Comm, subject: Setup | FromFile, sizes: dict[str, int], steps: int, limit_s: float
) -> TrainingVerification:
    """Every rank of somebody else's world calls this, and gets the same result."""
    check_mesh(world.size, sizes["pp"], sizes["dp"], sizes["cp"], sizes["tp"], sizes["ep"])
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
        ranks = all_gather_objects(world, _on_rank(world, subject, sizes, _stepped(one), limit_s, folder))
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return judge(Mesh(world.size, **sizes), one, ranks)


def _stepped(one: OneProcess) -> list[bool]:
    """Return for each step whether one process's optimizer did one."""
    return [step.stepped for step in one.run.steps]


def _first_difference(a: Recorded, b: Recorded) -> str | None:
    """Return what two runs in one process first differ in, bit for bit."""
    if _differs(a.initial, b.initial):
        return "the initial weights"
    for number, (x, y) in enumerate(zip(a.steps, b.steps)):
        if x.loss != y.loss and not (x.loss != x.loss and y.loss != y.loss):
            return f"the loss of step {number}"
        for what in ("gradients", "weights"):
            if name := _differs(getattr(x, what), getattr(y, what)):
                return f"the {what} of {name} in step {number}"
    return None


def _differs(a: Tensors, b: Tensors) -> str | None:
    for name in a.keys() | b.keys():
        x, y = (held.get(name, Held(None, None)).value for held in (a, b))
        if (x is None) != (y is None) or (x is not None and y is not None and not _equal(x, y)):
            return name
    return None


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num())


def _trains_otherwise(a: Recorded, b: Recorded) -> bool:
    return any(_differs(x.weights, y.weights) for x, y in zip(a.steps, b.steps))
