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
    norms: tuple[float, float],
) -> str:
    """Say how a rank's gradient comes from the right one; "" if it is neither a part of it nor a multiple.

    got, want  of one parameter, on every rank that holds a part of it
    norms      of all of this rank's gradients, and of all of one process's
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
        sides = torch.stack([x.flatten() for x in others], 1)
        shares = torch.linalg.lstsq(sides, right.double().flatten()[:, None]).solution.flatten()
        if right.numel() < 2 * len(ranks) or not _near((sides @ shares).view(right.shape), right):
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
        return ""
    for axes, ranks in groups_of(mesh, rank):
        if abs(times - len(ranks)) < ALIKE:
            return f"{len(ranks)} times the right one: summed over {axes}, where the mean is meant"
        if abs(times * len(ranks) - 1) < ALIKE:
            return f"1/{len(ranks)} of the right one: divided by the size of {axes} once too often"
    if math.isclose(*norms, rel_tol=ALIKE):
        return f"{times:.4g} times the right one: clipped by the norm of this rank's part, not of the whole"
    return f"{times:.4g} times the right one, entry by entry"


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
    if one.steps[step].drew:
        for axes, pair in _pairs(mesh, ("tp",)):
            a, b = (ranks[r].steps[step].generator for r in pair)
            if a != b:
                yield f"ranks {_listed(pair)} ({axes}) draw other random numbers: their dropout masks differ"
        yield (
            "the step draws from torch's generator, so that its masks depend on the mesh; verify without dropout, or with "
            "masks by position"
        )
    if mesh.sizes["dp"] > 1 and one.batch_norm:
        yield f"{one.batch_norm[0]}, a BatchNorm in training mode, normalises by its own rank's rows"


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
        return
    counts = [len(ranks[r].steps[step].samples) for r in firsts]
    if len(set(counts)) > 1:
        yield f"ranks train on {min(counts)} to {max(counts)} samples: a mean of their means is not the mean of all"


def _pairs(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
    for rank in range(mesh.world_size):
        ranks = mesh.group(rank, *axes)
        if ranks[0] == rank:
            for pair in combinations(ranks, 2):
                yield " x ".join(axes), pair


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
