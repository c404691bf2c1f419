"""Likely causes of a training that differs from one process: each is looked for in what the ranks were seen to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice

import torch
from torch import Tensor

from minipar.mesh import Mesh
from minipar.train.verification.own_training.watch import Recorded

AXES = (("dp",), ("tp",), ("cp",), ("ep",), ("pp",), ("dp", "cp"), ("pp", "dp", "cp", "tp"))
DREW = (
    "the step draws from torch's generator, so that its masks depend on the mesh; verify without dropout, or with masks by "
    "position"
)
ALIKE = 1e-3  # relative; a cause is a guess, so rounding of any dtype passes


def groups_of(mesh: Mesh, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the groups of two or more ranks that the rank is in, with the axes' names; each group once."""
    seen = set()
    for axes in AXES:
        ranks = mesh.group(rank, *axes)
        if len(ranks) > 1 and ranks not in seen:
            seen.add(ranks)
            yield " x ".join(axis for axis in axes if mesh.sizes[axis] > 1), ranks


def why_gradient(
    mesh: Mesh,
    rank: int,
    got: Mapping[int, Tensor | None],
    want: Mapping[int, Tensor],
    norms: tuple[float, float, float],
    before: Tensor | None,
) -> str:
    """Say how a rank's gradient comes from the right one; "" if it is neither a part of it nor a multiple.

    got, want  of one parameter, on every rank that holds a part of it
    norms      of this rank's gradients, of the same parts of one process's, and of all of one process's
    before     this rank's gradient in the step before
    """
    mine, right = got[rank], want[rank]
    if mine is None:
        return "it has no gradient here: frozen, unused, or cut off from the loss"
    square = (right.double() ** 2).sum().item()
    times = (mine.double() * right.double()).sum().item() / square if square else math.nan
    remains = None
    if not _near(mine, right * times):
        times = math.nan
        remains = None if before is None else _shares([right, before], mine)
    why: dict[str, object] = {}  # what may be, and whether it is
    for axes, ranks in groups_of(mesh, rank):
        n, those = len(ranks), f"ranks {_listed(ranks)} ({axes})"
        same = [x for r in ranks if r in want and _same(want[r], right) and (x := got[r]) is not None]
        apart = len(same) == n and not all(_near(x, mine) for x in same)  # else a multiple, if anything
        shares = _shares(same, right) if apart else None
        why |= {
            f"a partial sum: those of {those} add up to it, and nobody sums them": _all_near(shares, 1),
            f"each of {those} keeps its own: nobody averages them": _all_near(shares, 1 / n),
            f"each of {those} keeps its own, clipped by its own norm: nobody averages them": shares
            is not None,
            f"{n} times the right one: summed over {axes}, where the mean is meant": abs(times - n) < ALIKE,
            f"1/{n} of the right one: divided by the size of {axes} once too often": abs(times * n - 1)
            < ALIKE,
        }
    factor = f"{times:{'.9g' if abs(times - 1) < ALIKE else '.4g'}} times the right one"
    clipped = f"{factor}: clipped to the right norm, from another scale or beside other gradients that differ"
    still = "the gradient of the step before is still in it: is zero_grad called?"
    got_norm, own_norm, whole_norm = norms
    why |= {
        still: remains is not None and remains[1].abs() > ALIKE,
        "": math.isnan(times),
        f"{factor}, entry by entry": not math.isclose(got_norm, whole_norm, rel_tol=ALIKE),
        f"{factor}: clipped by the norm of this rank's part, not of the whole": (
            own_norm < whole_norm * (1 - ALIKE)
        ),
        clipped: True,
    }
    return next(words for words, holds in why.items() if holds)


def _all_near(shares: Tensor | None, each: float) -> bool:
    return shares is not None and _near(shares, torch.full_like(shares, each))


def _shares(parts: Sequence[Tensor], whole: Tensor) -> Tensor | None:
    """Return by what the parts are multiplied in the sum that is the whole; None if it is no such sum."""
    sides = torch.stack([x.double().flatten() for x in parts], 1)
    if not sides.isfinite().all() or not whole.isfinite().all():
        return None
    shares = torch.linalg.lstsq(sides, whole.double().flatten()[:, None]).solution.flatten()
    told = whole.numel() >= 2 * len(parts)  # fewer equations than that have a solution by chance
    return shares if told and _near((sides @ shares).view(whole.shape), whole) else None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _near(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    largest = max(b.abs().max().item() if b.numel() else 0.0, 1e-300)
    return not a.numel() or (a.double() - b.double()).abs().max().item() <= ALIKE * largest


def why_step(mesh: Mesh, one: Recorded, ranks: Sequence[Recorded], step: int) -> Iterator[str]:
    """Yield what ranks do in this step that they shouldn't: wrong samples, other random numbers, statistics of a part."""
    yield from islice(_wrong_samples(mesh, *samples_of(one, ranks, step)), 1)
    for pair in _pairs(mesh, "dp"):
        for has, lacks in (pair, pair[::-1]):
            uses, others = (ranks[rank].steps[step].used for rank in (has, lacks))
            if lacking := sorted((uses - others) & one.steps[step].used):
                yield f"{', '.join(lacking)} gets a gradient on rank {has}, and none on rank {lacks} (dp)"
                return
    if one.steps[step].drew:
        for pair in _pairs(mesh, "tp"):
            if len({ranks[r].steps[step].generator for r in pair}) > 1:
                yield f"ranks {_listed(pair)} (tp) draw other random numbers: their dropout masks differ"
    if mesh.sizes["dp"] > 1 and (norms := one.batch_norm or ranks[0].batch_norm):
        yield f"{norms[0]}, a BatchNorm in training mode, normalises by its own rank's rows"


def samples_of(one: Recorded, ranks: Sequence[Recorded], step: int) -> tuple[list[bytes], list[list[bytes]]]:
    """Return one process's samples and each rank's, along the first dim in which any of the ranks' are one process's."""
    batch, *seen = (run.steps[step].samples for run in (one, *ranks))
    dim = next((d for d in (0, 1) if any(set(batch[d]).intersection(own[d]) for own in seen)), 0)
    return batch[dim], [own[dim] for own in seen]


def _wrong_samples(mesh: Mesh, batch: list[bytes], of_ranks: list[list[bytes]]) -> Iterator[str]:
    if len(set(batch)) < len(batch) or mesh.sizes["cp"] > 1:
        return  # rows can't be told apart, or are cut
    # Later stages see activations.
    seen = {r: set(own) for r, own in enumerate(of_ranks) if mesh.coordinates_of(r).pp == 0}
    if not any(seen.values()):
        return  # the model was not called as a module
    for a, b in _pairs(mesh, "dp"):
        if a in seen and (both := len(seen[a] & seen[b])):
            yield f"ranks {a} and {b} (dp) train on the same samples: {both} of {len(seen[a])}"
    for a, b in _pairs(mesh, "tp"):
        if a in seen and seen[a] != seen[b]:
            yield f"ranks {a} and {b} (tp) must see the same samples, and don't"
    for r, own in seen.items():
        if foreign := len(own - set(batch)):
            yield f"{foreign} of {len(own)} samples of rank {r} are not in one process's batch"
    if missing := len(set(batch).difference(*seen.values())):
        yield f"{missing} of {len(batch)} samples of one process's batch reach no rank"


def why_sum(one: Recorded, ranks: Sequence[Recorded], step: int) -> str:
    """Return what may be wrong where samples are right and nothing else is known: how ranks' losses are put together."""
    counts = {len(own) for own in samples_of(one, ranks, step)[1] if own}
    if len(counts) > 1:
        return f"ranks train on {min(counts)} to {max(counts)} samples: the mean of their means is not the mean of all"
    return (
        "no multiple and no part of the right one: a mean of the ranks' means, where their counts of tokens differ? a clip "
        "before the average? a sum that the backward lacks?"
    )


def _pairs(mesh: Mesh, axis: str) -> Iterator[tuple[int, ...]]:
    for rank in range(mesh.world_size):
        ranks = mesh.group(rank, axis)
        if ranks[0] == rank:
            yield from combinations(ranks, 2)


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
