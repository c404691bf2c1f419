"""Compressors in place of the reductions of DDP, ZeroOptimizer and FSDP, and one compressor for each Comm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.transport.stream import Handle, Pending
from minipar.data_parallel.arguments import CommOf, function_of_parameter
from minipar.data_parallel.flat_layout import Layout, slice_of_chunk
from minipar.data_parallel.reductions import BucketReduction, reduce_plainly
from minipar.extras.compress.plain_mean import Compressor, Tensors
from minipar.mesh import placement_of, set_placement
from minipar.support.chunks import bounds, chunk_sizes


class Compressors:
    """One compressor per Comm, made by `make(comm)`; experts have another Comm, as they have fewer replicas."""

    def __init__(self, make: Callable[[Comm], Compressor]):
        self.make = make
        self.by_comm: dict[Comm, Compressor] = {}

    def of(self, comm: Comm) -> Compressor:
        if comm not in self.by_comm:
            self.by_comm[comm] = self.make(comm)
        return self.by_comm[comm]

    def key(self, param: Tensor) -> Tensor:
        """Return what compressors know a parameter's tensors by."""
        return param


class Averages(Compressors):
    """Averages tensors of parameters, each over the ranks of its Comm, `comm_of(parameter)`."""

    def __init__(self, make: Callable[[Comm], Compressor], comm: Comm | CommOf):
        super().__init__(make)
        self._comm_of = function_of_parameter(comm)

    def means(self, tensors: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return parameter -> mean of its tensor over the ranks that hold a replica of the parameter."""
        by_comm: dict[Comm, dict[Tensor, Tensor]] = {}
        for key, x in tensors.items():
            by_comm.setdefault(self._comm_of(key), {})[key] = x
        found: dict[Tensor, Tensor] = {}
        for comm, own in by_comm.items():
            found |= own if comm.size == 1 else self.of(comm).means(own)
        return found


class CompressedBuckets(Compressors):
    """The `reduce_bucket` of DDP, ZeroOptimizer or FSDP that sends the messages of compressors.

    make      a function from Comm to its compressor
    scatters  True: where a rank keeps a chunk of the means, a compressor that can scatter sends only that. False: it sends
              all means to every rank, so that ZeRO-1 gives DDP's bits

    On one rank nothing is compressed.
    """

    def __init__(self, make: Callable[[Comm], Compressor], scatters: bool = True):
        super().__init__(make)
        self.scatters = scatters
        self._stand_ins: dict[Tensor, Tensor] = {}

    def __call__(self, reduction: BucketReduction) -> Pending:
        if reduction.comm.size == 1:
            return reduce_plainly(reduction)
        compressor = self.of(reduction.comm)
        layout = {self.key(param): place for param, place in reduction.layout.items()}
        scatters = reduction.sizes is not None and self.scatters and compressor.scatters
        kind = "compressed_reduce_scatter" if scatters else "compressed_all_reduce"
        average = partial(_scatter if scatters else _average, compressor, reduction, layout)
        with reduction.comm.saying(reduction.label):
            handle: Pending = reduction.comm.custom(kind, average, async_op=True)
        return handle

    def key(self, param: Tensor) -> Tensor:
        """Return what compressors know a gradient by: the parameter or, of a shard, a tensor like the whole parameter."""
        placement = placement_of(param)
        if placement.flat is None:
            return param
        if param not in self._stand_ins:
            self._stand_ins[param] = torch.empty(placement.length, dtype=param.dtype, device="meta")
            set_placement(self._stand_ins[param], replace(placement, flat=None))
        return self._stand_ins[param]


@torch.no_grad()
def own_gradients(reduction: BucketReduction) -> Pending:
    """Send nothing: each rank takes its own gradients for the mean, since the optimizer averages momenta or weights."""
    if reduction.op == "sum":
        reduction.flat.mul_(reduction.comm.size)
    return Handle.finished_with(_own_part(reduction))


@torch.no_grad()
def _average(compressor: Compressor, reduction: BucketReduction, layout: Layout) -> Tensor:
    """Replace the gradients in `flat` by the means or, for op="sum", sums; return `flat`, or this rank's chunk of it."""
    flat, comm = reduction.flat, reduction.comm
    parts = {key: flat[start : start + n].view(key.shape) for key, (start, n) in layout.items()}
    for key, mean in compressor.means(parts).items():
        parts[key].copy_(mean if reduction.op == "mean" else mean * comm.size)
    if reduction.flags is not None:
        comm.all_reduce_(reduction.flags)
    return _own_part(reduction)


def _own_part(reduction: BucketReduction) -> Tensor:
    """Return `flat` or, where `sizes` are given, a copy of this rank's chunk."""
    flat, sizes = reduction.flat, reduction.sizes
    return flat if sizes is None else flat.split(list(sizes))[reduction.comm.rank].clone()


@torch.no_grad()
def _scatter(compressor: Compressor, reduction: BucketReduction, layout: Layout) -> Tensor:
    """Return this rank's chunk of the means or sums, with zeros in the padding. A chunk's end may cut a gradient."""
    comm, flat, sizes = reduction.comm, reduction.flat, reduction.sizes
    assert sizes is not None
    means = compressor.scattered_means(parts_by_rank(flat, layout, sizes))
    start = sum(sizes[: comm.rank])
    chunk = flat.new_zeros(sizes[comm.rank])
    for key, mean in means.items():
        place = chunk[slice_of_chunk(*layout[key], (start, start + len(chunk)))]
        place.copy_(mean if reduction.op == "mean" else mean * comm.size)
    return chunk


def parts_by_rank(flat: Tensor, layout: Layout, sizes: Sequence[int]) -> list[dict[Tensor, Tensor]]:
    """Return, for each rank, the pieces of the gradients in its chunk of `flat`, without empty ones."""
    return _cut_at({key: (start, flat[start : start + n]) for key, (start, n) in layout.items()}, sizes)


def chunked(tensors: Tensors, p: int) -> list[dict[Any, Tensor]]:
    """Return, for each of p ranks, the pieces of the tensors in its chunk of all elements, without empty ones."""
    starts = bounds([x.numel() for x in tensors.values()])
    placed = {key: (start, x.flatten()) for (key, x), start in zip(tensors.items(), starts)}
    return _cut_at(placed, chunk_sizes(starts[-1], p))


def _cut_at(placed: Mapping[Any, tuple[int, Tensor]], sizes: Sequence[int]) -> list[dict[Any, Tensor]]:
    parts: list[dict[Any, Tensor]] = [{} for _ in sizes]
    ends = bounds(sizes)[1:-1]
    for key, (start, x) in placed.items():
        for part, piece in zip(parts, x.tensor_split([min(max(end - start, 0), len(x)) for end in ends])):
            if len(piece):
                part[key] = piece
    return parts
