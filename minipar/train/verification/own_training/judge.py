"""The comparison of a training on a mesh with the same in one process, row by row, and what else is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.mesh import Mesh
from minipar.train.reference import known
from minipar.train.verification.own_training.causes import DREW, why_gradient, why_step, why_sum
from minipar.train.verification.own_training.parts import Part, itself, parts_of
from minipar.train.verification.own_training.watch import Held, Interrupted, Recorded, Tensors
from minipar.train.verification.verify import Row, diverges, lines_of

# The difference allowed, relative to a tensor's largest entry; more where rounding alone does more in one process.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF = 3e-2  # in bfloat16 and float16
ROUNDINGS = 32  # times what a last bit of the initial weights changes
SHOWN = 4  # names in a row's words

Whole = dict[str, Tensor]


class TrainingVerification(NamedTuple):
    """The result of `verify_training`.

    rows     a row for each comparison with one process, in the order of the run; `row.place` is the likely cause
    faults   what the training does wrong beside that, one sentence each; such mistakes one process may make, too
    notes    conventions that were met, and not held against it
    """

    mesh: str
    rows: list[Row]
    faults: list[str]
    notes: list[str]

    @property
    def equal(self) -> bool:
        """Whether every number is that of one process, and nothing else is wrong."""
        return self.first_divergence is None and not self.faults

    @property
    def first_divergence(self) -> Row | None:
        return next((row for row in self.rows if not row.equal), None)

    def __str__(self) -> str:
        first = self.first_divergence
        shown, causes = self.rows, []
        if first is not None:  # what comes later follows from it, but a loss's gradients say more
            end = shown.index(first)
            end += first.what.startswith("loss") and shown[end + 1].what.startswith("gradients")
            shown = shown[: end + 1]
            causes = [cause for row in shown if not row.equal for cause in row.place.split("\n") if cause]
        notes = [f"note: {note}" for note in self.notes] + [f"WRONG: {fault}" for fault in self.faults]
        lines = [*lines_of(shown), *notes]
        if first is not None:
            lines += [diverges(self.mesh, first), *(f"  {cause}" for cause in dict.fromkeys(causes))]
        elif not self.faults:
            rest = ", of what was compared" if any("not compared" in note for note in self.notes) else ""
            lines.append(f"{self.mesh}: the numbers of one process{rest}")
        return "\n".join(lines)


class OneProcess(NamedTuple):
    """One process's run, and the same with the last bit of its initial weights changed."""

    run: Recorded
    nudged: Recorded
    resumed: Interrupted | None
    sums: bool  # whether gradients of earlier steps are added to those of later ones


def judge(
    mesh: Mesh, one: OneProcess, seen: list[tuple[Recorded, Interrupted | None]]
) -> TrainingVerification:
    ranks = [recorded for recorded, _ in seen]
    whole = _whole(one.run.initial)
    found = _Judge(mesh, one, ranks, [parts_of(r.initial, whole, mesh, i) for i, r in enumerate(ranks)])
    resumed = islice(_resumed_faults(one, ranks, [again for _, again in seen]), 1)
    return TrainingVerification(_name(mesh), [*found.rows()], [*found.faults(), *resumed], found.notes)


class _Judge:
    """The comparison of all ranks with one process."""

    def __init__(
        self, mesh: Mesh, one: OneProcess, ranks: list[Recorded], parts: list[dict[str, Part | None]]
    ):
        self._mesh, self._one, self._ranks, self._parts = mesh, one, ranks, parts
        self._found = {part.name for held in parts for part in held.values() if part}
        self._half = any(r.half for r in [one.run, *ranks])
        dtypes = {x.dtype for x in _whole(one.run.initial).values() if x.is_floating_point()}
        self._tolerance = (
            HALF if self._half else max(map(_tolerance, dtypes), default=TOLERANCE[torch.float32])
        )
        self.notes: list[str] = []
        if self._half:
            self.notes.append(f"modules compute in 16 bits, so differences up to {HALF:.0%} are not seen")

    def rows(self) -> Iterator[Row]:
        run, nudged = self._one.run, self._one.nudged
        initial = [r.initial for r in self._ranks]
        yield self._covered(self._tensors("initial weights", initial, run.initial, nudged.initial))
        if run.buffers:
            held = [r.buffers for r in self._ranks]
            yield self._tensors("initial buffers", held, run.buffers, nudged.buffers)
        for number, step in enumerate(run.steps):
            theirs, after = [r.steps[number] for r in self._ranks], nudged.steps[number]
            if (row := self._loss(number, [s.loss for s in theirs], step.loss, after.loss)) is not None:
                yield self._explained(row, number)
            yield from islice(self._rates(number, [s.rates for s in theirs], step.rates), 1)
            for what in ("gradients", "weights", "buffers"):
                held = [getattr(s, what) for s in theirs]
                want, moved = getattr(step, what), getattr(after, what)
                if want or what != "buffers":
                    row = self._tensors(f"{what}, step {number}", held, want, moved, number)
                    yield self._explained(row, number)

    def faults(self) -> Iterator[str]:
        """Yield mistakes that one process may make, too, so that no comparison finds them."""
        run = self._one.run
        if run.untrained:
            yield f"no optimizer holds {_some(run.untrained)}: it gets gradients, and nobody trains it"
        for who, r in _named_runs(run, self._ranks):
            if r.strangers != run.strangers:
                yield (
                    f"on {who} the optimizer holds {r.strangers} parameters that are not the model's: was it made before "
                    "the model was cut, wrapped or replaced?"
                )
                break
        trained = {
            part.name
            for parts, r in zip(self._parts, self._ranks)
            for n in r.trained
            if (part := parts.get(n))
        }
        if lost := [name for name in run.trained if name not in trained and name in self._found]:
            yield f"one process trains {_some(lost)}, and no rank's optimizer holds it"
        if run.strangers:
            self.notes.append(
                f"the optimizer holds {run.strangers} parameters that are not the returned model's: not compared"
            )
        if not any(held.value is not None for step in run.steps for held in step.gradients.values()):
            yield "no parameter has a gradient when the optimizer steps: is backward called, or zero_grad after it?"
        if run.idle:
            yield f"the learning rate schedule {run.idle[0]} was never stepped in {len(run.steps)} steps"
        if self._one.sums and not run.untrained:
            yield "gradients of earlier steps are added to those of later ones: is zero_grad called?"

    def _pieces(self, held: list[Tensors], wholes: Whole) -> Iterator[tuple[int, str, Part, Tensor | None]]:
        """Yield what ranks hold: the rank, the name there, the part of one process's tensor that it is, and the value.

        The part is that of the parameter, of whose gradient ZeRO has a range; or a whole buffer.
        """
        for rank, (tensors, parts) in enumerate(zip(held, self._parts)):
            for own, (placement, value) in tensors.items():
                part = parts.get(own)
                if part and placement is not None and placement.flat is not None:
                    part = part._replace(cut=placement.slice_of)
                elif (
                    own not in parts
                    and own in wholes
                    and value is not None
                    and value.shape == wholes[own].shape
                ):
                    part = Part(own, itself)
                if part and (part.name in wholes or value is not None):
                    yield rank, own, part, value

    def _tensors(self, what: str, held: list[Tensors], want: Tensors, moved: Tensors, number: int = 0) -> Row:
        """Compare every rank's parts with one process's tensors. The words say how many differ, and why the worst does."""
        wholes, changed = _whole(want), _whole(moved)
        largest = max(map(_size, wholes.values()), default=0.0)
        worst, count = (-1.0, 0.0, "", 0), 0  # first what is nearest to its limit
        wrong: dict[str, tuple[float, int]] = {}
        for rank, _, part, got in self._pieces(held, wholes):
            count += 1
            right = wholes.get(part.name)
            apart, limit = _apart(part, got, right, changed.get(part.name), largest, self._half)
            worst = max(worst, (apart / limit if limit else apart, apart, part.name, rank))
            if apart > limit:
                wrong[part.name] = max(wrong.get(part.name, (apart, rank)), (apart, rank))
        if not wrong:
            return Row(what, count, *worst[1:], True)
        name = max(wrong, key=lambda name: wrong[name])
        apart, rank = wrong[name]
        why = {
            "initial": "it is no part of one process's: is the seed, the cut or the order of construction another?",
            "weights": "its gradient was right: are the optimizer's state, groups, weight decay or rate others?"
            if name in self._one.run.trained
            else "no optimizer holds it: who changes it?",
            "gradien": self._why_gradient(held, name, rank, wholes, number)
            if what.startswith("gradien")
            else "",
        }.get(what[:7], "")
        words = [] if len(wrong) == 1 else [f"{len(wrong)} tensors differ: {_some(list(wrong))}"]
        return Row(what, count, apart, name, rank, False, "\n".join([*words, why]))

    def _covered(self, row: Row) -> Row:
        """Return the row of initial weights, wrong if a parameter is on no rank; note what can't be told to be a part."""
        missing = [name for name in self._one.run.initial if name not in self._found]
        unknown = [
            (name, i) for i, parts in enumerate(self._parts) for name, part in parts.items() if part is None
        ]
        if unknown:
            name, rank = unknown[0]
            lacking = f", so {_some(missing)} is not compared" if missing else ""
            value = self._ranks[rank].initial[name].value
            self.notes.append(
                f"nothing tells what part of one process's model {name} on rank {rank} is, of shape "
                f"{[] if value is None else list(value.shape)}{lacking}; a Placement would (minipar.mesh.set_placement)"
            )
        elif missing and row.equal:
            why = f"no rank holds {_some(missing)}"
            return row._replace(difference=math.inf, worst=missing[0], rank=0, equal=False, place=why)
        return row

    def _why_gradient(self, held: list[Tensors], name: str, rank: int, wholes: Whole, number: int) -> str:
        if name not in wholes:
            return "it has a gradient, and none in one process: is it frozen there alone?"
        got: dict[int, Tensor | None] = {}
        want: dict[int, Tensor] = {}
        before = None
        mine: list[tuple[Tensor, Tensor]] = []
        for r, own, part, value in self._pieces(held, wholes):
            right = part.cut(wholes[part.name]) if part.name in wholes else None
            if right is not None and part.name == name:
                got[r], want[r] = value, right
                if r == rank and number:
                    before = self._ranks[r].steps[number - 1].gradients[own].value
            if right is not None and r == rank and value is not None:
                mine.append((value, right))
        norms = (_norm(x for x, _ in mine), _norm(x for _, x in mine), _norm(wholes.values()))
        return why_gradient(self._mesh, rank, got, want, norms, before)

    def _rates(self, number: int, of_ranks: list[dict[str, float]], want: dict[str, float]) -> Iterator[Row]:
        for rank, (rates, parts) in enumerate(zip(of_ranks, self._parts)):
            for own, rate in rates.items():
                part = parts.get(own)
                if part and rate != (right := want.get(part.name, rate)):
                    asked = ": is the schedule stepped?" if number else ""
                    words = f"{rate:.6g}, and {right:.6g} in one process{asked}"
                    yield Row(f"learning rate, step {number}", 0, math.inf, own, rank, False, words)

    def _loss(
        self, number: int, by_rank: list[float | None], want: float | None, moved: float | None
    ) -> Row | None:
        """Compare the losses with one process's. If they are not that, they may be of ranks' parts, which is noted."""
        losses = {rank: loss for rank, loss in enumerate(by_rank) if loss is not None}
        if want is None or not losses:
            return None
        limit = self._tolerance * abs(want) + ROUNDINGS * abs((moved or want) - want)
        apart = {rank: known(abs(loss - want)) for rank, loss in losses.items()}
        rank, total = max(apart, key=lambda r: apart[r]), sum(losses.values())
        equal = apart[rank] <= limit
        alone = any(by_rank[peer] is None for r in losses for peer in self._mesh.group(r, "dp"))
        along_tp = ((loss, losses.get(self._mesh.group(r, "tp")[0], loss)) for r, loss in losses.items())
        of_parts = min(losses.values()) < want < max(losses.values()) or abs(total - want) <= limit
        finite = all(map(math.isfinite, (want, *losses.values())))
        if not equal and finite and (alone or of_parts and all(abs(a - b) <= limit for a, b in along_tp)):
            if not number:  # later ones follow from what differs before
                self.notes.append(
                    "ranks return losses of their own parts: gradients decide whether these are right"
                )
            return None
        words = f"{losses[rank]:.6g} where one process has {want:.6g}; the ranks' mean is {total / len(losses):.6g}"
        relative = apart[rank] / (abs(want) or 1)
        return Row(f"loss, step {number}", len(losses), relative, "loss", rank, equal, words)

    def _explained(self, row: Row, step: int) -> Row:
        """Add what ranks do in this step that they shouldn't."""
        if row.equal:
            return row
        one = self._one.run
        words = [*why_step(self._mesh, one, self._ranks, step)]
        told, unknown = bool(words), not row.place.split("\n")[-1]
        words += filter(None, row.place.split("\n"))
        if not told and one.steps[step].drew and (unknown or row.what.startswith("loss")):
            words.append(DREW)
        elif not told and unknown and row.what.startswith("gradients"):
            words.append(why_sum(one, self._ranks, step))
        return row._replace(place="\n".join(words))


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, HALF)


def _whole(held: Tensors) -> Whole:
    return {name: value for name, (_, value) in held.items() if value is not None}


def _apart(
    part: Part, got: Tensor | None, right: Tensor | None, moved: Tensor | None, largest: float, half: bool
) -> tuple[float, float]:
    """Return how far a part is from the right one, and how far it may be, relative to the whole tensor's largest entry."""
    if right is None or got is None:
        other = got if right is None else part.cut(right)
        assert other is not None
        return (math.inf if other.numel() and _size(other) else 0.0), 0.0
    want = part.cut(right)
    if got.shape != want.shape:
        return math.inf, 0.0
    if right.is_complex() and got.is_complex():
        got, want, right = (torch.view_as_real(x) for x in (got, want, right))
        moved = None if moved is None else torch.view_as_real(moved)
    if not (right.is_floating_point() and got.is_floating_point()):
        return float(not torch.equal(got, want)), 0.0
    coarse = min(got.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    # Entries that are rounding alone, such as the gradient of a key's bias, are held against the largest tensor's.
    scale = max(_size(right), 100 * torch.finfo(coarse).eps * largest)
    limit = HALF if half else _tolerance(coarse)
    if moved is not None and scale:
        limit = max(limit, ROUNDINGS * known(_size(moved.double() - right.double()) / scale))
    apart = _size(got.double() - want.double())
    return known(apart / scale if scale else apart), limit


def _name(mesh: Mesh) -> str:
    """Return "dp=2, tp=2"."""
    return ", ".join(f"{axis}={n}" for axis, n in mesh.sizes.items() if n > 1 and axis != "edp") or "one rank"


def _size(x: Tensor) -> float:
    return (x.double() if x.dtype == torch.bool else x).abs().max().item() if x.numel() else 0.0


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum((x.double() ** 2).sum().item() for x in tensors))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _named_runs(one: Any, ranks: list[Any]) -> list[tuple[str, Any]]:
    return [("one process", one), *((f"rank {i}", r) for i, r in enumerate(ranks))]


def _resumed_faults(
    one: OneProcess, ranks: list[Recorded], resumed: list[Interrupted | None]
) -> Iterator[str]:
    """Yield what a run that was saved, set up anew and loaded does otherwise than the one that wasn't interrupted."""
    runs = [one.run, *ranks]
    for run, (who, again) in zip(runs, _named_runs(one.resumed, resumed)):
        if again is None:
            continue
        saved, loaded, rates, last = again
        if name := first_apart(saved, loaded):
            yield f"a checkpoint doesn't restore {name} on {who}: after load(folder) it is another than when saved"
        elif rates != run.steps[-1].rates:
            yield f"a checkpoint doesn't restore the learning rate on {who}"
        elif name := first_apart(run.steps[-1].weights, last):
            yield (
                f"a checkpoint restores the weights on {who}, and {name} still becomes another: is the optimizer's state, "
                "a buffer or the number of the step missing?"
            )


def first_apart(a: Tensors, b: Tensors, exact: bool = False) -> str | None:
    """Return the name of the first tensor that differs, by more than rounding unless `exact`; None if none does."""
    for name in a | b:
        x, y = (held.get(name, Held(None, None)).value for held in (a, b))
        if x is None or y is None:
            if x is not y:
                return name
            continue
        limit = 0.0 if exact else _tolerance(x.dtype) * _size(x)
        if x.shape != y.shape or not torch.allclose(x, y.to(x.dtype), rtol=0, atol=limit, equal_nan=True):
            return name
    return None
