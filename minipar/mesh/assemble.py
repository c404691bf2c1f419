"""Assemble a global tensor from the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from minipar.mesh.placement import Placement


@torch.no_grad()
def gather(parts: Iterable[tuple[Placement, torch.Tensor]], check_replicas: bool = True) -> torch.Tensor:
    """Assemble the global tensor from (placement, local tensor) pairs, in any order.

    Replicas of a part (the first is used) must be bitwise equal, unless check_replicas is False. Different parts must not
    overlap, and together they must cover the tensor. Allocates the tensor and one byte per element.

    Raises ValueError, with the tensor's name, for parts of several tensors, a gap, an overlap, or replicas that differ.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("no parts to gather")
    first, like = parts[0]
    name, shape = first.name, first.global_shape
    full = like.new_empty(shape)
    written = like.new_zeros(shape, dtype=torch.bool)
    copies: dict[object, torch.Tensor] = {}
    for placement, local in parts:
        if (placement.name, placement.global_shape, local.dtype) != (name, shape, like.dtype):
            raise ValueError(
                f"{placement.name} {placement.global_shape} {local.dtype} is not {name} {shape} {like.dtype}"
            )
        placement._require_shape("local", local, placement.local_shape)
        if placement.part not in copies:
            copies[placement.part] = local
            _write_once(placement, full, written, local)
        elif check_replicas and not _bitwise_equal(copies[placement.part], local):
            raise ValueError(f"{name}: copies of {placement.part[1]} differ")
    if not written.all():
        gap = tuple((~written).nonzero()[0].tolist())
        raise ValueError(
            f"{name}: {int((~written).sum())} of {full.numel()} elements are in no part, the first at {gap}"
        )
    return full


def _write_once(placement: Placement, full: torch.Tensor, written: torch.Tensor, local: torch.Tensor) -> None:
    for piece in placement.pieces():
        if piece.of_full(written).any():
            raise ValueError(f"{placement.name}: {piece.box} overlaps another part")
        piece.of_full(written).fill_(True)
    placement.write_into(full, local)


def _bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare as bytes, so that nan equals nan."""
    a, b = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)
