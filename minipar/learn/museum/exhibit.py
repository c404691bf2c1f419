"""An exhibit: a real fault, planted in working code, run, and found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple
from unittest import mock

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh
from minipar.runtime.launch import run
from minipar.spec import SPECIFICATIONS
from minipar.support.errors import RankError
from minipar.train.data.text import Text, load_text
from minipar.train.reference import train_in_one_process

verification = import_module("minipar.train.verification.verify")  # the package also has a function `verify`

Symptom = Literal[
    "fine and wrong",
    "off by a factor",
    "hang",
    "nan",
    "only on resume",
    "only on another mesh",
    "slow or large",
]
CURVE_STEPS = 30


class Finding(NamedTuple):
    """The result of running the faulty code.

    symptom  what the fault's author sees: losses, an error, nothing
    proof    the message of the failing check
    table    the whole comparison by `verify`, if `verify` is the failing check
    losses   name -> loss of each step, to draw: with and without the fault
    """

    symptom: str
    proof: str
    table: str = ""
    losses: dict[str, list[float]] | None = None


@dataclass(frozen=True)
class Exhibit:
    """A fault and its story. gallery.toml has the stories, and explains each field."""

    name: str
    title: str
    symptom: Symptom
    axis: str
    real: str
    story: str
    missed: str
    rule: str
    says: str

    def run(self, curve: bool = True) -> Finding:
        raise NotImplementedError

    def run_without_fault(self) -> bool:
        """Return whether the same check passes without the fault."""
        raise NotImplementedError


Change = Callable[[object, str, object], None]
Fault = Callable[[Comm, Change], None]


@dataclass(frozen=True)
class MeshExhibit(Exhibit):
    """A fault in the library: `fault(world, change)` calls `change(owner, name, value)` for each attribute to replace."""

    config: TrainConfig
    fault: Fault

    def run(self, curve: bool = True) -> Finding:
        losses = self._curves() if curve else None
        symptom = "" if losses is None else _described(losses)
        try:
            result = self._verified(self.fault)
        except (RankError, ArithmeticError) as error:
            return Finding(symptom or "the run fails", str(error), losses=losses)
        return Finding(
            symptom, verification.table(result).splitlines()[-1], verification.table(result), losses
        )

    def run_without_fault(self) -> bool:
        equal: bool = self._verified(None).equal
        return equal

    def _verified(self, fault: Fault | None) -> Any:
        observe = partial(_observe, fault)
        with mock.patch.object(verification, "_observe_rank", observe):
            return verification.verify(self.config)

    def _curves(self) -> dict[str, list[float]] | None:
        """Return the losses of a longer run, in one process and on the mesh with the fault; None if that run fails."""
        config = replace(self.config, steps=CURVE_STEPS, warmup=3)
        text = load_text(config.text)
        try:
            wrong = run(
                partial(_losses, self.fault),
                config,
                text,
                world_size=config.world_size,
                timeout_s=config.timeout_s,
            )[0]
        except RankError:
            return None
        right = run(_right_losses, config, text, world_size=1)[0]
        return {"as it should be": right, "with the fault": wrong}


@contextmanager
def _planted(fault: Fault | None, world: Comm) -> Iterator[None]:
    """Plant the fault, if there is one, in this rank's modules, for as long as the block lasts."""
    with ExitStack() as stack:
        if fault is not None:
            fault(world, lambda *args: stack.enter_context(mock.patch.object(*args)))
        yield


def _observe(fault: Fault | None, world: Comm, config: TrainConfig, text: Text) -> Any:
    """Plant the fault, if there is one, and run the steps of `verify` on this rank."""
    with _planted(fault, world):
        return verification._observe_rank(world, config, text)


def _losses(fault: Fault | None, world: Comm, config: TrainConfig, text: Text) -> list[float]:
    """Train by the functions that `verify` calls, since a fault may replace one of them; keep the losses alone."""
    with _planted(fault, world):
        mesh = Mesh(world, **config.mesh_sizes)
        state = verification.parallelize(config, mesh, world.device)
        steps = range(config.steps)
        return [verification.train_step(world, state, config, text, step)["loss"] for step in steps]


def _right_losses(world: Comm, config: TrainConfig, text: Text) -> list[float]:
    return train_in_one_process(config, text, config.steps).losses


def _described(losses: dict[str, list[float]]) -> str:
    right, wrong = losses["as it should be"], losses["with the fault"]
    return (
        f"the loss after {len(right)} steps is {wrong[-1]:.4f}; it should be {right[-1]:.4f}. "
        f"At the first step {wrong[0]:.4f} and {right[0]:.4f}"
    )


@dataclass(frozen=True)
class FloorExhibit(Exhibit):
    """A faulty version of a function or class in `minipar.simple`, checked by its specification."""

    specification: str
    wrong: Callable[..., Any]
    right: Callable[..., Any]

    def run(self, curve: bool = True) -> Finding:
        report = SPECIFICATIONS[self.specification].check(self.wrong)
        passed = [verdict.stage for verdict in report.verdicts if verdict.words is None]
        symptom = f"it passes: {', '.join(passed)}" if passed else "it fails at once"
        wrong = report.first_wrong
        return Finding(symptom, (wrong and wrong.words) or "nothing")

    def run_without_fault(self) -> bool:
        ok: bool = SPECIFICATIONS[self.specification].check(self.right).ok
        return ok
