"""Placement: the part of a global tensor that a local tensor holds; nothing else records it.

    global tensor   split, shard ->   block         flatten_range ->   range of the flattened block
    [F, D]                            [F/tp, D]                        [F/tp * D / dp]

A tensor-parallel weight is a block; its ZeRO shard is a range of that flattened block. Each transformation
(tensor parallelism, ZeRO, ...) adds its own cut to the existing placement, so initialisation, gradient norm,
checkpoints and verification work for any combination of transformations.

Every placement is a few boxes of the global tensor (`pieces`). Slicing, writing back, gathering and
overlapping are loops over these boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from minipar.mesh.regions import Box, Piece, boxes_of_range
from minipar.mesh.shard_gradient import mark_gradient, trainable
from minipar.support.chunks import chunk_sizes


@dataclass(frozen=True)
class Placement:
    """The part of a global tensor that a local tensor holds.

    name           canonical: the tensor's name in the one-process model
    global_shape   shape of the tensor in the one-process model
    start, length  the block held, per dim
    flat           None, or (start, stop): the range of the flattened block held; the local tensor has one dim
    replicated     mesh axes along which all or some other ranks hold the same part. Ranks with equal `part` are replicas:
                   of 4 tp ranks, 2 may share a key/value head
    tied_to        None, or the canonical name of the parameter that this one is a copy of
    expert         whether it is a weight of experts, which are sharded over ep
    rows           None, or the entries of dim 0 held, in the local tensor's order, where they are not consecutive: experts
                   that were moved. `start` and `length` of dim 0 then only count them: 0 and their number

    Raises ValueError, with the name, if a block or range is outside its tensor.
    """

    name: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    length: tuple[int, ...]
    flat: tuple[int, int] | None = None
    replicated: frozenset[str] = frozenset()
    tied_to: str | None = None
    expert: bool = False
    rows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("global_shape", "start", "length"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if not len(self.global_shape) == len(self.start) == len(self.length):
            raise ValueError(
                f"{self.name}: {self.global_shape}, {self.start} and {self.length} differ in dims"
            )
        for dim, size in enumerate(self.global_shape):
            self._require_range(f"dim {dim}", self.start[dim], self.start[dim] + self.length[dim], size)
        if self.flat is not None:
            self._require_range("the flattened block", *self.flat, prod(self.length))

    @classmethod
    def whole(cls, name: str, shape: Iterable[int], expert: bool = False) -> Placement:
        """Make the placement of the whole tensor `name`, to which cuts are then applied."""
        shape = tuple(shape)
        return cls(name, shape, (0,) * len(shape), shape, expert=expert)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.length if self.flat is None else (self.flat[1] - self.flat[0],)

    @property
    def numel(self) -> int:
        return prod(self.local_shape)

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold the rest of the tensor."""
        return self.numel != prod(self.global_shape)

    @property
    def part(self) -> tuple[str, tuple[Box, ...]]:
        """The elements held, however they were cut; local tensors with equal parts are replicas."""
        return self.name, tuple(piece.box for piece in self.pieces())

    def pieces(self) -> Iterator[Piece]:
        """Yield the part as boxes, in the local tensor's order; none if it is empty.

        There are at most 2 * dims - 1 boxes; with `rows`, each of them is yielded row by row.
        """
        if self.flat is None and self.rows is None:
            if self.numel:
                yield Piece(Box(self.start, self.length), None)
            return
        offset = 0
        for box in boxes_of_range(self.length, *(self.flat or (0, prod(self.length)))):
            for part in self._in_rows(box):
                yield Piece(part.shifted(self.start), offset)
                offset += part.numel

    def _in_rows(self, box: Box) -> Iterator[Box]:
        """Yield a box of the block as boxes of consecutive entries of dim 0."""
        if self.rows is None:
            yield box
            return
        (first, *start), (count, *length) = box
        for row in self.rows[first : first + count]:
            yield Box((row, *start), (1, *length))

    def split(self, dim: int, start: int, length: int) -> Placement:
        """Keep [start, start + length) of dim `dim`, relative to the start of the block."""
        dim = self._require_dim(dim)
        self._require_range(f"dim {dim}", start, start + length, self.length[dim])
        if self.rows is not None and dim == 0:
            raise ValueError(f"{self.name}: dim 0 holds rows={self.rows}; split before they are moved")
        return replace(
            self,
            start=_with(self.start, dim, self.start[dim] + start),
            length=_with(self.length, dim, length),
        )

    def shard(self, dim: int, index: int, count: int) -> Placement:
        """Keep chunk `index` of `count` along `dim`. Sizes are those that collectives use: 5 in 4 chunks is 2, 2, 1, 0."""
        if not 0 <= index < count:
            raise ValueError(f"{self.name}: index={index} is not one of {count} shards; use 0 to {count - 1}")
        sizes = chunk_sizes(self.length[self._require_dim(dim)], count)
        return self.split(dim, sum(sizes[:index]), sizes[index])

    def flatten_range(self, start: int, stop: int) -> Placement:
        """Keep elements [start, stop) of the flattened local tensor. After this, only flatten_range can cut further."""
        self._require_range("the flattened local tensor", start, stop, self.numel)
        begin = self.flat[0] if self.flat else 0
        return replace(self, flat=(begin + start, begin + stop))

    def with_rows(self, rows: Iterable[int]) -> Placement:
        """Hold these entries of dim 0 in place of as many others; they need not be consecutive, nor in order."""
        rows = tuple(rows)
        if len(rows) != self.length[0] or len(set(rows)) < len(rows):
            raise ValueError(f"{self.name}: rows={rows} are not {self.length[0]} different entries of dim 0")
        for row in rows:
            self._require_range("dim 0", row, row + 1, self.global_shape[0])
        return replace(self, rows=rows, start=_with(self.start, 0, 0))

    def replicate(self, *axes: str) -> Placement:
        return replace(self, replicated=self.replicated | set(axes))

    def tie(self, name: str) -> Placement:
        return replace(self, tied_to=name)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the local tensor: a view of the global one, except that a flat range may need a copy."""
        self._require_shape("global", full, self.global_shape)
        if self.flat is None and self.rows is None:
            return Piece(Box(self.start, self.length), None).of_full(full)
        flat = [piece.of_full(full).reshape(-1) for piece in self.pieces()]
        local = flat[0] if len(flat) == 1 else torch.cat([full.new_empty(0), *flat])
        return local.view(self.local_shape)

    @torch.no_grad()
    def write_into(self, full: torch.Tensor, local: torch.Tensor) -> None:
        """Copy the local tensor into its part of the global one. Inverse of slice_of."""
        self._require_shape("global", full, self.global_shape)
        self._require_shape("local", local, self.local_shape)
        for piece in self.pieces():
            piece.of_full(full).copy_(piece.of_local(local))

    def _require_dim(self, dim: int) -> int:
        if self.flat is not None:
            raise ValueError(
                f"{self.name}: flat={self.flat} cannot be split along a dim; split before flattening"
            )
        dims = len(self.global_shape)
        if not -dims <= dim < dims:
            raise ValueError(f"{self.name}: dim={dim} is not a dim of shape {self.global_shape}")
        return dim % dims

    def _require_range(self, what: str, start: int, stop: int, size: int) -> None:
        if not 0 <= start <= stop <= size:
            raise ValueError(f"{self.name}: [{start}, {stop}) is not inside [0, {size}) of {what}")

    def _require_shape(self, which: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{self.name}: the {which} tensor has shape {tuple(x.shape)}, it should be {shape}"
            )


def overlap(a: Placement, b: Placement) -> Iterator[tuple[Box, Piece, Piece]]:
    """Yield (box, piece of a, piece of b) for each box of the global tensor that both placements hold.

    Resharding x into y is q.of_local(y, box).copy_(p.of_local(x, box)) for each box, p, q.
    """
    if (a.name, a.global_shape) != (b.name, b.global_shape):
        raise ValueError(f"{a.name} {a.global_shape} and {b.name} {b.global_shape} are not one tensor")
    for p in a.pieces():
        for q in b.pieces():
            box = p.box.intersection(q.box)
            if box.numel:
                yield box, p, q


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def set_placement(param: torch.Tensor, placement: Placement) -> None:
    """Store the placement on the parameter, as `param.placement`.

    It survives assignment to `param.data`, `module.to(...)` and pickling. It is lost if another Parameter replaces this
    one, as with copy.deepcopy; then it must be set again.

    Where other ranks hold the rest of the parameter, its gradients are `ShardGradient`s.
    Raises ValueError if the parameter's shape is not the placement's local shape.
    """
    placement._require_shape("local", param, placement.local_shape)
    param.placement = placement  # type: ignore[attr-defined]
    if placement.is_part and placement.flat is None:
        hooks = param._post_accumulate_grad_hooks or {}
        with trainable(param) as can_train:
            if can_train and mark_gradient not in hooks.values():
                param.register_post_accumulate_grad_hook(mark_gradient)


def cut_in_place(param: torch.Tensor, part: torch.Tensor, placement: Placement) -> None:
    """Make the parameter this rank's part: the same object, so that an optimizer which has it trains the part.

    While an output of before is kept, autograd keeps the shape that it gave the parameter's gradient; it forgets that where
    the dtype changes in between.
    """
    other = torch.float32 if part.dtype == torch.float64 else torch.float64
    param.grad, param.data = None, torch.empty(0, dtype=other, device=part.device)
    param.data = part
    set_placement(param, placement)


def placement_of(param: torch.Tensor) -> Placement:
    """Return the parameter's placement. Raises ValueError if it has none."""
    placement: Placement | None = getattr(param, "placement", None)
    if placement is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has no placement that says what part of the model it is: its "
            "model was not split or wrapped, or it was made later; call minipar.mesh.place_whole(model) before"
        )
    return placement


def holds_part(param: torch.Tensor) -> bool:
    """Return whether the parameter's placement, if it has one, says that other ranks hold the rest."""
    placement: Placement | None = getattr(param, "placement", None)
    return placement is not None and placement.is_part


def require_no_part(params: Iterable[torch.Tensor], instead: str) -> None:
    """Raise ValueError if a placement says that other ranks hold the rest of a parameter; the error suggests `instead`."""
    for placement in (placement_of(p) for p in params if holds_part(p)):
        raise ValueError(
            f"comm=None says that this process holds all of the model, but of {placement.name} "
            f"{list(placement.global_shape)} it holds {placement.numel} elements; pass the ranks that hold the parts: "
            f"{instead}"
        )


def place_whole(module: torch.nn.Module, prefix: str = "") -> None:
    """Give every parameter without a placement the placement of a whole tensor, named as in the module.

    Parameters of submodules with `has_expert_parameters` are marked as experts. `module.tied_copies`, {own name: canonical
    name}, lists the tied copies.
    """
    tied = getattr(module, "tied_copies", {})
    experts = {
        p for m in module.modules() if getattr(m, "has_expert_parameters", False) for p in m.parameters()
    }
    for name, param in module.named_parameters():
        if getattr(param, "placement", None) is None:
            placement = Placement.whole(prefix + name, param.shape, expert=param in experts)
            set_placement(param, placement.tie(tied[name]) if name in tied else placement)
