"""Likely causes of a training that differs from one process: each is looked for in what the ranks were seen to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

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
    for axes, ranks in groups_of(mesh, rank):
        same = [got.get(r) for r in ranks if r in want and _same(want[r], right)]
        others = [x.double() for x in same if x is not None]
        if len(others) < len(ranks):
            continue
        if all(_near(x, mine) for x in others):
            continue  # a multiple, if anything
        if (shares := _shares(others, right)) is None:
            continue
        if _near(shares, torch.ones(len(ranks))):
            return (
                f"a partial sum: those of ranks {_listed(ranks)} ({axes}) add up to it, and nobody sums them"
            )
        clipped = (
            "" if _near(shares, torch.full_like(shares, 1 / len(ranks))) else ", clipped by its own norm"
        )
        return f"each of ranks {_listed(ranks)} ({axes}) keeps its own{clipped}: nobody averages them"
    square = (right.double() ** 2).sum().item()
    times = (mine.double() * right.double()).sum().item() / square if square else math.nan
    if not _near(mine, right * times):
        if (
            before is not None
            and (shares := _shares([right, before], mine)) is not None
            and shares[1].abs() > ALIKE
        ):
            return "the gradient of the step before is still in it: is zero_grad called?"
        return ""
    for axes, ranks in groups_of(mesh, rank):
        if abs(times - len(ranks)) < ALIKE:
            return f"{len(ranks)} times the right one: summed over {axes}, where the mean is meant"
        if abs(times * len(ranks) - 1) < ALIKE:
            return f"1/{len(ranks)} of the right one: divided by the size of {axes} once too often"
    got_norm, own_norm, whole_norm = norms
    factor = (
        f"{times:.9g} times the right one" if abs(times - 1) < ALIKE else f"{times:.4g} times the right one"
    )
    if not math.isclose(got_norm, whole_norm, rel_tol=ALIKE):
        return f"{factor}, entry by entry"
    if own_norm < whole_norm * (1 - ALIKE):
        return f"{factor}: clipped by the norm of this rank's part, not of the whole"
    return f"{factor}: clipped to the right norm, from another scale or beside other gradients that differ"


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
    yield from _samples(mesh, one, ranks, step)
    for axes, (first, second) in _pairs(mesh, ("dp",)):
        uses = {rank: ranks[rank].steps[step].used for rank in (first, second)}
        for has, lacks in ((first, second), (second, first)):
            if lacking := sorted((uses[has] - uses[lacks]) & one.steps[step].used):
                yield f"{', '.join(lacking)} gets a gradient on rank {has}, and none on rank {lacks} ({axes})"
                return
    if one.steps[step].drew:
        for axes, pair in _pairs(mesh, ("tp",)):
            if len({ranks[r].steps[step].generator for r in pair}) > 1:
                yield f"ranks {_listed(pair)} ({axes}) draw other random numbers: their dropout masks differ"
    if mesh.sizes["dp"] > 1 and (norms := one.batch_norm or ranks[0].batch_norm):
        yield f"{norms[0]}, a BatchNorm in training mode, normalises by its own rank's rows"


def _samples(mesh: Mesh, one: Recorded, ranks: Sequence[Recorded], step: int) -> Iterator[str]:
    batch = one.steps[step].samples
    if len(set(batch)) < len(batch) or mesh.sizes["cp"] > 1:
        return  # rows can't be told apart, or are cut
    firsts = [r for r in range(len(ranks)) if mesh.coordinates_of(r).pp == 0]  # later stages see activations
    seen = {r: set(ranks[r].steps[step].samples) for r in firsts}
    if not any(seen.values()):
        return  # the model was not called as a module
    for axes, (a, b) in _pairs(mesh, ("dp",)):
        if a in seen and seen[a] & seen[b]:
            both = len(seen[a] & seen[b])
            yield f"ranks {a} and {b} ({axes}) train on the same samples: {both} of {len(seen[a])}"
            return
    for axes, (a, b) in _pairs(mesh, ("tp",)):
        if a in seen and seen[a] != seen[b]:
            yield f"ranks {a} and {b} ({axes}) must see the same samples, and don't"
            return
    union = set().union(*seen.values())
    for r in firsts:
        if foreign := len(seen[r] - set(batch)):
            yield f"{foreign} of {len(seen[r])} samples of rank {r} are not in one process's batch"
            return
    if missing := len(set(batch) - union):
        yield f"{missing} of {len(batch)} samples of one process's batch reach no rank"


def why_sum(ranks: Sequence[Recorded], step: int) -> str:
    """Return what may be wrong where samples are right and nothing else is known: how ranks' losses are put together."""
    counts = [len(seen.samples) for r in ranks if (seen := r.steps[step]).samples]
    if len(set(counts)) > 1:
        return f"ranks train on {min(counts)} to {max(counts)} samples: the mean of their means is not the mean of all"
    return (
        "no multiple and no part of the right one: a mean of the ranks' means, where their counts of tokens differ? a clip "
        "before the average? a sum that the backward lacks?"
    )


def _pairs(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
    for rank in range(mesh.world_size):
        ranks = mesh.group(rank, *axes)
        if ranks[0] == rank:
            for pair in combinations(ranks, 2):
                yield " x ".join(axes), pair


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
