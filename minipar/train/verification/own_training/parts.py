"""The part of a one-process parameter that a rank's tensor is: told by its placement, its name, or its first values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.mesh import Mesh
from minipar.support.chunks import chunk_sizes
from minipar.train.verification.own_training.watch import Held, Tensors, digest


class Part(NamedTuple):
    """The part of the one-process parameter `name` that a tensor holds: `cut(whole)`."""

    name: str
    cut: Callable[[Tensor], Tensor]


def parts_of(held: Tensors, whole: Mapping[str, Tensor], mesh: Mesh, rank: int) -> dict[str, Part | None]:
    """Return the part that each of a rank's tensors is, by the rank's own names; None where nothing tells.

    held    the rank's tensors after `setup`
    whole   one process's

    A tensor without a placement is the parameter of its name. If its shape differs in one dim, it holds the rows whose
    values it has or, where equal rows leave that open, the block that its coordinate on the mesh would hold. Where values
    show that names are a pipeline stage's own, a tensor is the parameter with the same values; among several with equal
    values, such as norms of ones, the one that keeps the order of the others.
    """
    parts = {name: _by_name(name, one, whole, mesh, rank) for name, one in held.items()}
    alike = {  # the parameters with the same values
        name: [n for n, x in whole.items() if one.value is not None and _equal(x, one.value)]
        for name, one in held.items()
        if one.placement is None
    }
    if any(len(alike[n]) == 1 and not _fits(parts[n], held[n].value, whole) for n in alike):
        parts |= dict.fromkeys(alike)
    order, own = list(whole), list(held)
    at = {own.index(n): order.index(p.name) for n, p in parts.items() if p is not None}
    for name in sorted((n for n in alike if parts[n] is None), key=lambda name: len(alike[name])):
        mine = own.index(name)
        near = min(at, key=lambda other: (-_shared(own[other], name), abs(other - mine)), default=None)
        expected = mine if near is None else at[near] + mine - near
        free = [n for n in alike[name] if order.index(n) not in at.values()]
        if free:
            found = min(free, key=lambda n: abs(order.index(n) - expected))
            parts[name], at[mine] = Part(found, itself), order.index(found)
    return parts


def _shared(a: str, b: str) -> int:
    """Return how many modules two parameters have in common, from the outermost on."""
    return len(os.path.commonprefix([a.split(".")[:-1], b.split(".")[:-1]]))


def _fits(part: Part | None, value: Tensor | None, whole: Mapping[str, Tensor]) -> bool:
    return part is not None and value is not None and _equal(part.cut(whole[part.name]), value)


def itself(x: Tensor) -> Tensor:
    return x


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _by_name(name: str, held: Held, whole: Mapping[str, Tensor], mesh: Mesh, rank: int) -> Part | None:
    placement = held.placement
    if placement is not None:
        for known in (name, placement.tied_to or placement.name, placement.name):
            if known in whole and tuple(whole[known].shape) == placement.global_shape:
                return Part(known, placement.slice_of)
    if name not in whole or held.value is None:
        return None
    value, want = held.value, whole[name]
    if value.shape == want.shape:
        return Part(name, itself)
    differing = [dim for dim, (n, size) in enumerate(zip(value.shape, want.shape)) if n != size]
    if value.dim() != want.dim() or len(differing) != 1:
        return None
    (dim,) = differing
    rows = _rows_of(value.movedim(dim, 0), want.movedim(dim, 0)) or _block(
        value.shape[dim], want.shape[dim], mesh, rank
    )
    return None if rows is None else Part(name, lambda x: x.index_select(dim, torch.tensor(rows)))


def _rows_of(local: Tensor, whole: Tensor) -> list[int]:
    """Return where the rows of `local` are in `whole`, if each is there once."""
    places: dict[bytes, list[int]] = {}
    for i, row in enumerate(whole):
        places.setdefault(digest(row), []).append(i)
    rows = [places.get(digest(row), []) for row in local]
    return [row[0] for row in rows] if all(len(row) == 1 for row in rows) else []


def _block(length: int, size: int, mesh: Mesh, rank: int) -> list[int] | None:
    """Return the rows that a rank's coordinate would hold, along the first axis that cuts them so."""
    at = mesh.coordinates_of(rank)
    for axis in ("tp", "ep", "cp", "dp", "pp"):
        sizes, mine = chunk_sizes(size, mesh.sizes[axis]), getattr(at, axis)
        if mesh.sizes[axis] > 1 and sizes[mine] == length:
            return list(range(sum(sizes[:mine]), sum(sizes[: mine + 1])))
    return None
