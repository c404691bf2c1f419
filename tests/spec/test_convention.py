"""Conventions are stated by an implementation, not held against it, and said; what no convention excuses is red."""

import re
from functools import partial
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from minipar.simple import autograd, continuous, pipeline, tensor_parallel
from minipar.spec import SPECIFICATIONS, check, conventions
from minipar.spec.convention import CONVENTIONS
from tests.spec.wrong.blind import along_a_chain

ADAPTERS = Path(__file__).parents[2] / "docs" / "adapters"
COLLECTIVES, LOSS = (run_path(str(ADAPTERS / f"{name}.py")) for name in ("collectives", "loss"))


class ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        return COLLECTIVES["all_reduce"](comm, x)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def without_f(comm, x, gate, up, down):
    return ReduceFromRanks.apply(F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down), comm)


STATED = {
    "in place": ("all_reduce", COLLECTIVES["all_reduce_"], "was written to"),
    "equal lengths": ("reduce_scatter", COLLECTIVES["reduce_scatter"].__wrapped__, "raised RuntimeError"),
    "two ranks or more": ("shift", COLLECTIVES["shift"].__wrapped__, "on one rank"),
    "any tree": ("broadcast", along_a_chain, "the last rank gets it in round 3; a tree takes 2 rounds"),
    "mean of means": (
        "global_loss",
        LOSS["global_loss"].__wrapped__,
        "each rank divides by its own number of tokens",
    ),
    "partial gradients": ("mlp", without_f, "the gradient of x .* add up to it"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("convention", STATED)
def test_a_convention_is_said_and_not_held_against_anybody(convention):
    name, implementation, _ = STATED[convention]
    stated = conventions(convention)(lambda *args: implementation(*args))
    report = check(name, stated)
    assert report.ok, str(report)
    assert f"by convention: {convention}" in str(report)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("convention", STATED)
def test_what_is_not_stated_is_held_against_an_implementation(convention):
    name, implementation, words = STATED[convention]
    report = check(name, implementation)
    assert report.first_wrong is not None, "it was called right"
    assert re.search(words, report.first_wrong.words), str(report)


def strided_inputs_fail(comm, module, loss_fn, inputs, targets, m, shape, dtype):
    if inputs is not None and not inputs.is_contiguous():
        inputs = inputs * 0
    return pipeline.gpipe(comm, module, loss_fn, inputs, targets, m, shape, dtype)


def test_contiguous_results_excuse_no_strided_input():
    report = check("pipeline_gpipe", conventions("contiguous")(strided_inputs_fail), ["varied"])
    assert "not contiguous" in str(report)


def test_a_stage_that_was_never_asked_is_not_met():
    stated = conventions("two ranks or more")(autograd.all_reduce)
    report = check("mlp", stated, ["runs"])
    assert not report.ok
    assert str(report) == "mlp: 0 of 1 stages met, by convention: two ranks or more; runs: it was not asked"
    stated = conventions("two ranks or more")(partial(tensor_parallel.mlp))
    assert ": right, in 1 of 2 stages, by convention" in str(check("mlp", stated, ["runs", "small"]))


class Scheduler:
    plan, advance = staticmethod(continuous.plan), staticmethod(continuous.advance)


class Bare:
    __slots__ = ()

    def __call__(self, comm, x, root=0):
        return comm.broadcast(x, root)

    sent = __call__


@pytest.mark.parametrize("sends", [Bare(), Bare().sent], ids=["slots", "a bound method"])
def test_what_takes_no_attributes_can_state_a_convention(sends):
    assert check("broadcast", conventions("any tree")(sends), ["small"]).ok


def test_an_object_that_states_a_convention_keeps_its_methods():
    for one in (Scheduler(), SimpleNamespace(plan=continuous.plan, advance=continuous.advance)):
        report = check("scheduler_step", conventions("in place")(one), ["small"])
        assert report.ok, str(report)
        assert "by convention: in place" in str(report)
        assert not hasattr(one, "conventions")


@pytest.mark.parametrize("convention", ["in place", "two ranks or more"])
def test_a_convention_excuses_nothing_else(convention):
    report = check("all_reduce", conventions(convention)(lambda comm, x: x.clone()), ["small"])
    assert "the part of rank 1 is missing" in str(report)


def test_a_convention_that_there_is_not_is_refused():
    with pytest.raises(
        ValueError, match="conventions='unequal lengths': there are two ranks or more, in place"
    ):
        conventions("unequal lengths")


def test_a_convention_that_a_specification_does_not_know_is_refused():
    with pytest.raises(
        ValueError, match="conventions='any tree' is unknown to all_reduce, which knows two ranks"
    ):
        check("all_reduce", conventions("any tree")(COLLECTIVES["all_reduce"]), ["runs"])


def test_each_convention_is_known_to_a_specification_and_said_by_it():
    for name, words in CONVENTIONS.items():
        assert any(f"{name} ({words})" in one.words for one in SPECIFICATIONS.values() if name in one.words)


@pytest.mark.parametrize(
    ("implementation", "found"),
    [(lambda x: x, "<lambda>(x)"), (lambda comm, x, out: x, "<lambda>(comm, x, out)")],
)
def test_a_wrong_signature_is_said_beside_the_one_asked(implementation, found):
    words = check("all_reduce", implementation).first_wrong.words
    assert f"its signature is {found}: " in words
    assert words.endswith("; asked is all_reduce(comm, x)")
    assert "\n" not in words
