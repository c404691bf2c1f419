"""Functions called on every rank, as data: how arguments are drawn, and what one process answers. One runner for all.

Each question is asked in the same way: once; then several times before the first backward, and the backwards in
another order; with a residual around it, y + x, where y has the shape of x; in other dtypes, strides and values. What one
process answers is differentiated by autograd, so that a question needs no backward of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.spec.convention import stated
from minipar.spec.counted import counted
from minipar.spec.from_file import Implementation
from minipar.spec.specification import WORLDS, Body, Specification, Stage, every
from minipar.spec.varied import KINDS, PLAIN, Kind
from minipar.spec.words import Wrong, generator, grad_of, in_words, normal

Given = list[dict[str, Any]]  # each rank's arguments, by name and in their order
MORE_RANKS = (7,)
ALONE: Any = SimpleNamespace(size=1, rank=0)
VARIED_SEED = 5


@dataclass(frozen=True)
class Question:
    """A question that is put to a function.

    draw(size, seed, kind)  each rank's arguments, floats in float64; what is the same on all ranks is one tensor
    answer(given)           each rank's results; one that is the same on all ranks is one tensor, with one gradient
    results                 what the results are, in words
    attribute               the implementation is this attribute of what is checked
    by_name                 arguments passed by name -> their defaults, which the calls of odd seeds leave out
    seeds                   of the drawn cases
    differentiated          whether there is a backward
    summands                arguments of whose gradient, and results of which, each rank has a summand
    reached_by_nan          how many of the results are compared where an argument has a nan
    linear                  whether a nan in an incoming gradient reaches known gradients, which are compared
    cause(asked, got)       the usual mistake that gives this result, in words
    call(implementation, world, *args)  how it is called
    by_convention           convention -> what is asked of an implementation that states it
    """

    draw: Callable[[int, int, Kind], Given]
    answer: Callable[[Given], Sequence[Sequence[Tensor]]]
    results: tuple[str, ...]
    attribute: str = ""
    by_name: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = (2, 3, 4)
    differentiated: bool = True
    summands: Container[str] = ()
    reached_by_nan: int = 9
    linear: bool = False
    cause: Callable[[Asked, Tensor], str] = lambda asked, got: ""
    call: Callable[..., Any] = lambda function, *args, **named: function(*args, **named)
    by_convention: Mapping[str, Question] = field(default_factory=dict)


class Asked:
    """A question that was put to an implementation on this rank: its forward is done when it is made."""

    def __init__(
        self, world: Comm, function: Implementation, question: Question, seed: int, kind: Kind = PLAIN
    ):
        for convention in set(stated(function)) & set(question.by_convention):
            question = question.by_convention[convention]
        self.world, self.question, self.kind, r = world, question, kind, world.rank
        self.partial = "partial gradients" in stated(function)
        self.what = f"through {question.attribute}" if question.attribute else ""
        given = self.given = question.draw(world.size, seed, kind)
        self.leaves = {
            name: [rank[name] for rank in given]
            for name, x in given[r].items()
            if question.differentiated and isinstance(x, Tensor) and x.is_floating_point()
        }
        for x in (x for ranks in self.leaves.values() for x in ranks):
            x.requires_grad_()
        self.answers = [list(mine) for mine in question.answer(given)]
        self.mine = {
            name: kind.given(x, name in self.leaves) if isinstance(x, Tensor) else copy.deepcopy(x)
            for name, x in given[r].items()
        }
        named = {name: x for name, x in self.mine.items() if name in question.by_name}
        self.options = "".join(f", {name}={x}," for name, x in named.items())
        if seed % 2:
            named = {name: x for name, x in named.items() if x != question.by_name[name]}
        function = getattr(function, question.attribute) if question.attribute else function
        args = [x for name, x in self.mine.items() if name not in question.by_name]
        try:
            got = question.call(function, world, *args, **named)
        except Wrong as error:
            raise Wrong(f"{kind.words}: {error}" if kind.words else str(error)) from None
        self.got = list(got) if isinstance(got, tuple | list) else [got]

    def wrong_answer(self) -> str | None:
        """Compare the results."""
        r, names = self.world.rank, self.question.results
        if len(self.got) != len(names):
            return f"it returned {_kind(self.got)}; return {', '.join(names)}"
        for i, (name, got, want) in enumerate(zip(names, self.got, self.answers[r])):
            if self.kind.nan and i >= self.question.reached_by_nan:
                continue
            if not want.is_floating_point():
                if int(got) != int(want):
                    return f"{name} is {int(got)}; it should be {int(want)}"
                continue
            what = f"{name}{self.options}"
            if name in self.question.summands:
                if not isinstance(got, Tensor) or got.shape != want.shape or not got.requires_grad:
                    lost = ", which autograd cannot follow" if isinstance(got, Tensor) else ""
                    return f"{what} is {_kind(got)}{lost}; return one element that autograd can follow"
                got, what = self.world.all_reduce(got.detach()), f"{what}, added over all ranks,"
            if words := self._mismatch(what, got, [rank[i] for rank in self.answers]):
                return words + self.question.cause(self, got)
        return None

    def backward(self, seed: int, residual: bool = False) -> None:
        """Run the backward of the results, here and in one process, with a residual if the shapes are alike."""
        if not self.question.differentiated:
            return
        r, draw, total = self.world.rank, generator(self.world.size, seed, 11), torch.zeros(()).double()
        dys: dict[int, Tensor] = {}
        for y in (y for rank in self.answers for y in rank if y.is_floating_point()):
            if id(y) not in dys:
                dys[id(y)] = self.kind.rounded(normal(draw, *y.shape))
                if self.question.linear:
                    dys[id(y)] = self.kind.with_nan(dys[id(y)])
                total = total + (y * dys[id(y)]).sum()
        outs, given = [], []
        for got, want in zip(self.got, self.answers[r]):
            if want.is_floating_point():
                outs.append(got)
                given.append(self.kind.given(dys[id(want)]))
        x = self.mine[next(iter(self.leaves))]
        alike = x.shape == outs[0].shape and x.dtype == outs[0].dtype
        self.residual = (
            residual and alike and not self.kind.nan and not self.partial
        )  # it would bring the nan of dy by another way
        if self.residual:
            outs[0] = outs[0] + x
        self.dy = dys[id(self.answers[r][0])]
        torch.autograd.backward(outs, given)
        total.backward()

    def wrong_gradient(self) -> str | None:
        """Compare the gradients of the arguments."""
        if not self.question.differentiated or not (self.kind.backward or self.question.linear):
            return None
        r = self.world.rank
        for name in [*list(self.leaves)[1:], next(iter(self.leaves))]:  # that of x after those of weights
            got, leaves = self.mine[name].grad, self.leaves[name]
            added = None
            if name in self.question.summands or name in wholes(self.given):
                mine = torch.zeros_like(self.mine[name]) if got is None else got.contiguous()
                added = self.world.all_reduce(mine)
                got = added if name in self.question.summands or self.partial else got
            wants = [grad_of(x) for x in leaves]
            if self.residual and name == next(iter(self.leaves)):
                wants[r] = wants[r] + self.dy
            what = f"the gradient of {name} {self.what}".rstrip()
            if words := self._mismatch(what, got, wants):
                return words + self._cause(got, wants[r], added)
        return None

    def _cause(self, got: Any, want: Tensor, added: Tensor | None) -> str:
        """Name the usual mistake that gives this gradient, if one does. `added`: the ranks' gradients, of what all hold."""
        p, r = self.world.size, self.world.rank
        if p == 1 or not isinstance(got, Tensor) or self.residual:
            return ""
        own = [
            self.dy,
            *(self.dy.chunk(p, dim)[r] for dim in range(self.dy.dim()) if self.dy.shape[dim] % p == 0),
        ]
        if any(self.kind.mismatch("", got, dy) is None for dy in own):
            return ": it is this rank's dy alone; the other ranks' parts are missing"
        if added is not None and self.kind.mismatch("", added, want) is None:
            return ": it is this rank's summand; the gradients of all ranks add up to it, and are not added"
        same = all(y[0] is self.answers[0][0] for y in self.answers)
        summed = same and self.kind.mismatch("", got, p * want) is None
        return ": it is summed over ranks, but each rank's dy is complete" if summed else ""

    def _mismatch(self, what: str, got: Any, wants: list[Tensor]) -> str | None:
        """Compare with this rank's of `wants`; errors are relative to the largest entry of all ranks'."""
        p, r, whole = self.world.size, self.world.rank, torch.cat([x.detach().flatten() for x in wants])
        words = self.kind.mismatch(what, got, wants[r], p, whole)
        if words is None or not isinstance(got, Tensor) or got.numel() < 2:
            return words
        owners = [s for s, x in enumerate(wants) if self.kind.mismatch("", got, x, p, whole) is None]
        return words + (f": it is rank {owners[0]}'s" if owners else "")


def wholes(given: Given) -> list[str]:
    """Return the names of the arguments that all ranks hold, as one tensor."""
    floats = [name for name, x in given[0].items() if isinstance(x, Tensor) and x.is_floating_point()]
    return [name for name in floats if all(mine[name] is given[0][name] for mine in given)]


def ask(world: Comm, function: Implementation, question: Question, seed: int) -> str | None:
    """Ask once."""
    asked = Asked(world, function, question, seed)
    if words := asked.wrong_answer():
        return words
    asked.backward(seed)
    return asked.wrong_gradient()


def ask_often(
    world: Comm, function: Implementation, question: Question, of: Sequence[tuple[int, Kind]]
) -> str | None:
    """Ask several times before the first backward; the first call's backward is the last, the others keep their order."""
    calls = []
    for seed, kind in of:
        calls.append(Asked(world, function, question, seed, kind))
        if words := calls[-1].wrong_answer():
            return words
    for number, asked in enumerate([*calls[1:], calls[0]], 2):
        asked.backward(number, residual=True)
        if words := asked.wrong_gradient():
            return f"{words}: of call {(number - 1) % len(of) + 1} of {len(of)}, all made before the first backward"
    return None


Formula = Callable[[Given, int], range | tuple[float, ...]]


def sends(
    question: Question,
    formula: Formula,
    says: str,
    sizes: tuple[int, ...] = (2, 4),
    algorithm: str = "ring",
) -> Stage:
    """Return the stage of the bytes that a rank sends, forward and backward. formula(given, rank): those that are right."""

    def body(world: Comm, function: Implementation) -> str | None:
        given = question.draw(world.size, 1, PLAIN)
        with counted(world) as sent:
            Asked(world.using(algorithm), function, question, 1).backward(1)
        right = formula(given, world.rank)
        left = 2 * (world.size - 1) / world.size * sum(given[0][name].nbytes for name in wholes(given))
        if sent.sent_bytes + left * ("partial gradients" in stated(function)) in right:
            return None
        said = (
            f"{right[0]} to {right[-1]}" if isinstance(right, range) else " or ".join(f"{n:g}" for n in right)
        )
        return f"with {world.size} ranks it sent {in_words(sent)}; {says} send {said}"

    return Stage("bytes", body, sizes)


def _kind(x: object) -> str:
    return f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def bodies(question: Question, kinds: Sequence[Kind], alone: bool) -> dict[str, Body]:
    """Return the bodies of the stages that every question has."""
    hows: tuple[Any, ...] = (ask, ask_often)
    once, often = (partial(how, *[ALONE] * alone, question=question) for how in hows)
    return {
        "runs": partial(once, seed=0),
        "small": every(*(partial(once, seed=seed) for seed in (0, 1))),
        "drawn": partial(often, of=[(seed, PLAIN) for seed in question.seeds]),
        "varied": partial(often, of=[(VARIED_SEED, kind) for kind in kinds]),
    }


def specification(
    name: str,
    signature: str,
    requirement: str,
    questions: Sequence[Question],
    more: Sequence[Stage] = (),
    kinds: Sequence[Kind] = KINDS,
    conventions: tuple[str, ...] = (),
    alone: bool = False,
    writes: tuple[int, ...] = (),
) -> Specification:
    """Return the specification of a function that answers these questions.

    more     other stages, and what those of the questions also ask
    alone    whether it is asked on one rank, without a Comm
    writes   the arguments, by position, that it may write to
    """
    by_stage = [bodies(question, kinds, alone) for question in questions]

    def stage(name: Any, *sizes: Any) -> Stage:
        body = every(*(bodies[name] for bodies in by_stage), *(s.body for s in more if s.name == name))
        return Stage(name, body, () if alone else sizes, writes)

    asked = (
        stage("runs", 1),
        stage("small", 2),
        stage("drawn", *WORLDS, *MORE_RANKS),
        stage("varied", 2, 5),
    )
    names = {one.name for one in asked}
    stages = (*asked, *(one for one in more if one.name not in names))
    return Specification(name, signature, requirement, stages, conventions)
