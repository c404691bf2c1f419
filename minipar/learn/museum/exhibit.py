"""An exhibit: a real fault, planted in working code, run, and found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple
from unittest import mock

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.data.text import Text, load_text
from minipar.runtime.launch import run
from minipar.spec import SPECIFICATIONS
from minipar.support.errors import RankError

verification = import_module("minipar.verification.verify")  # the package also has a function `verify`

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
    table    the whole comparison by `verify`, if it is the check
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
        """Return the losses of a longer training run, with and without the fault; None if the run with the fault fails."""
        config = replace(self.config, steps=CURVE_STEPS, warmup=3)
        text = load_text(config.text)
        curves = {}
        for name, fault in (("as it should be", None), ("with the fault", self.fault)):
            try:
                curves[name] = run(
                    partial(_losses, fault),
                    config,
                    text,
                    world_size=config.world_size,
                    timeout_s=config.timeout_s,
                )[0]
            except RankError:
                return None
        return curves


def _observe(fault: Fault | None, world: Comm, config: TrainConfig, text: Text) -> Any:
    """Plant the fault, if there is one, in this rank's modules, and run the steps of `verify` on this rank."""
    with ExitStack() as stack:
        if fault is not None:
            fault(world, lambda *args: stack.enter_context(mock.patch.object(*args)))
        return verification._observe_rank(world, config, text)


def _losses(fault: Fault | None, world: Comm, config: TrainConfig, text: Text) -> list[float]:
    losses: list[float] = _observe(fault, world, config, text).losses
    return losses


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
        words = report.first_wrong.words if report.first_wrong else "nothing"
        return Finding(symptom, words)

    def run_without_fault(self) -> bool:
        ok: bool = SPECIFICATIONS[self.specification].check(self.right).ok
        return ok
