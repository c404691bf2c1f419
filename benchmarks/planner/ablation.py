"""The cost model without one of its terms, its numbers fitted again: what each term buys on runs held out.

A term that is taken out of a program's numbers or of the messages is put back by the same page the next time it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple
from unittest.mock import patch

from benchmarks.planner import fit
from benchmarks.planner.fit import NUMBERS, changed, dense, mixtures, program_of, ranking, unknown
from benchmarks.planner.published_runs import Run, published_runs
from minipar.cost import links, timing, work
from minipar.cost.machines import Machine
from minipar.cost.programs import PROGRAMS


class Score(NamedTuple):
    """Mean errors of held-out runs, without sign: dense ones of a known and of an unknown program, mixtures; ranking."""

    known: float
    unknown: float
    mixtures: float
    ranking: float


def score() -> Score:
    """Fit the numbers to the fitted half again, and return the errors of the other half."""
    default = fit.fitted_default()
    own = {name: fit.fitted_program(name) for name in NUMBERS}

    def stranger(run: Run) -> float:
        return run.error(unknown(run, arithmetic=default))

    def known(run: Run) -> float:
        how = own.get(program_of(run))
        return stranger(run) if how is None else run.error(how)

    held = [run for run in published_runs() if run.held_out]
    of_dense, of_mixtures = dense(held), mixtures(held)
    ranks = ranking(known)
    return Score(
        fit.mean_error(of_dense, known), fit.mean_error(of_dense, stranger), fit.mean_error(of_mixtures, stranger),
        fmean(ranks[table] for table in ranks if table != "xtuner"),
    )  # fmt: skip


def _attention_at_products_rate(stack: ExitStack) -> None:
    def fraction(machine: Machine) -> float:
        return machine.matmul_fraction

    stack.enter_context(
        changed(Machine, "attention_fraction", property(fraction, lambda machine, value: None))
    )


def _free(name: str) -> Callable[[ExitStack], None]:
    return lambda stack: stack.enter_context(changed(work, name, lambda *args, **how: 0.0))


def _number(module: object, name: str, value: float) -> Callable[[ExitStack], None]:
    return lambda stack: stack.enter_context(changed(module, name, value))


def _no_idle(stack: ExitStack) -> None:
    stack.enter_context(changed(timing, "idle_s", lambda *args: 0.0))


def _no_update(stack: ExitStack) -> None:
    stack.enter_context(changed(timing, "optimizer_seconds", lambda *args: 0.0))


def _no_latency(stack: ExitStack) -> None:
    stack.enter_context(changed(links, "_latency_s", lambda *args: 0.0))


def _no_fill(stack: ExitStack) -> None:
    for module in (links, timing):
        stack.enter_context(changed(module, "message_s", lambda latency_s, bytes_s: latency_s + bytes_s))


def _slower_by_nodes(stack: ExitStack) -> None:
    rates = links._rates

    def slower(machine: Machine, of: links.Links, kind: str) -> tuple[float, float]:
        inside, between = rates(machine, of, kind)
        return inside, between / (1 + 0.1 * (of.nodes - 1).bit_length())

    stack.enter_context(changed(links, "_rates", slower))


def _no_buckets(stack: ExitStack) -> None:
    stack.enter_context(changed(timing, "bucket_elems", lambda *args: float("inf")))


def _one_kind_of_program(stack: ExitStack) -> None:
    """Give every program what minipar overlaps and buckets."""
    same = dict(overlap_gradients=True, overlap_params=False, overlap_tp=False, once_per_rank=False)
    for name, program in PROGRAMS.items():
        how = replace(program.implementation, bucket_mb=None, bucket_layers=False, **same)  # type: ignore[arg-type]
        stack.enter_context(patch.dict(PROGRAMS, {name: program._replace(implementation=how)}))
    fit.forget()


# What the page says of a term -> how to leave it out, or to change it.
TERMS: dict[str, Callable[[ExitStack], None]] = {
    "the model as it is": lambda stack: None,
    "attention at the rate of products": _attention_at_products_rate,
    "no slower attention on short samples": _number(work, "SLOW_TOKENS", 0),
    "no slower products of experts with few rows": _number(work, "SLOW_ROWS", 0),
    "no element-wise traffic": _free("_memory_elems"),
    "no operand bytes of products": _free("_operand_bytes"),
    "no latency": _no_latency,
    "no fill of a message's hops": _no_fill,
    "no idle time": _no_idle,
    "no time for the update": _no_update,
    "all gradients in one message": _no_buckets,
    "gradients hide 0.3, not 0.9": _number(timing, "HIDDEN_GRADIENTS", 0.3),
    "ZeRO-3 hides nothing": _number(timing, "HIDDEN_ZERO3", 0.0),
    "ZeRO-3 hides 0.9, not 0.3": _number(timing, "HIDDEN_ZERO3", 0.9),
    "tp hides nothing where it is overlapped": _number(timing, "HIDDEN_TP", 0.0),
    "every program overlaps and buckets as ours": _one_kind_of_program,
    "between nodes a tenth slower for each doubling": _slower_by_nodes,
}


def scores() -> Iterator[tuple[str, Score]]:
    for words, leave_out in TERMS.items():
        with ExitStack() as stack:
            leave_out(stack)
            yield words, score()
    fit.forget()
