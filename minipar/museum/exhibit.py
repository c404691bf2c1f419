"""An exhibit: a fault that people shipped, planted, run, and found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple
from unittest import mock

from minipar.errors import RankError
from minipar.runtime.launch import run
from minipar.spec import SPECIFICATIONS
from minipar.train import verification
from minipar.train.text import load_text
from minipar.train.train_config import TrainConfig

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

    symptom  what its author sees: losses, an error, nothing
    proof    what the check says, which goes red
    table    all that `verify` compared, where it was `verify`
    losses   name -> loss of each step, to draw: with the fault, and without
    """

    symptom: str
    proof: str
    table: str = ""
    losses: dict[str, list[float]] | None = None


@dataclass(frozen=True)
class Exhibit:
    """A fault and its story.

    axis    where to look, as `--blind` asks: dp, zero, tp, sp, pp, ep, cp, loss, data or messages
    real    where it was shipped: projects with the number of their issue, or the kind of code that has it
    story   what was written, and what it does
    missed  why common tests do not see it
    rule    the rule to keep
    says    words of the proof; the test asks for them
    """

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
        """Return whether the same check is green without the fault."""
        raise NotImplementedError


Change = Callable[[object, str, object], None]
Fault = Callable[[object, Change], None]


@dataclass(frozen=True)
class MeshExhibit(Exhibit):
    """A fault in the library: `fault(world, change)` replaces attributes by `change(owner, name, value)`, on every rank."""

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
        return self._verified(None).equal

    def _verified(self, fault: Fault | None):
        observe = partial(_observe, fault)
        with mock.patch.object(verification, "_observe_rank", observe):
            return verification.verify(self.config)

    def _curves(self) -> dict[str, list[float]] | None:
        """The losses of a longer training, with the fault and without; None if the faulty one fails."""
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


def _observe(fault: Fault | None, world, config, text):
    """Run on a rank, whose modules are those of the library until the fault changes them."""
    with ExitStack() as stack:
        if fault is not None:
            fault(world, lambda *args: stack.enter_context(mock.patch.object(*args)))
        return verification._observe_rank(world, config, text)


def _losses(fault: Fault | None, world, config, text) -> list[float]:
    return _observe(fault, world, config, text).losses


def _described(losses: dict[str, list[float]]) -> str:
    right, wrong = losses["as it should be"], losses["with the fault"]
    return (
        f"the loss after {len(right)} steps is {wrong[-1]:.4f}; it should be {right[-1]:.4f}. "
        f"At the first step {wrong[0]:.4f} and {right[0]:.4f}"
    )


@dataclass(frozen=True)
class FloorExhibit(Exhibit):
    """A faulty version of something on the ground floor, held to its specification."""

    specification: str
    wrong: Callable
    right: Callable

    def run(self, curve: bool = True) -> Finding:
        report = SPECIFICATIONS[self.specification].check(self.wrong)
        passed = [verdict.stage for verdict in report.verdicts if verdict.words is None]
        symptom = f"it passes: {', '.join(passed)}" if passed else "it fails at once"
        words = report.first_wrong.words if report.first_wrong else "nothing"
        return Finding(symptom, words)

    def run_without_fault(self) -> bool:
        return SPECIFICATIONS[self.specification].check(self.right).ok
