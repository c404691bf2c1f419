"""Compressors in place of the reductions of DDP, ZeroOptimizer and FSDP, and one compressor for each Comm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.transport.stream import Handle, Pending
from minipar.data_parallel.arguments import CommOf, function_of_parameter
from minipar.data_parallel.flat_layout import Layout
from minipar.data_parallel.reductions import BucketReduction, reduce_plainly
from minipar.extras.compress.plain_mean import Compressor
from minipar.mesh import placement_of, set_placement


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

    make  a function from Comm to its compressor

    All means go to every rank, also where it keeps only a chunk of them: ZeRO-1 and -2 have DDP's bits and bytes, and under
    ZeRO-3 each unit is a message. On one rank nothing is compressed.
    """

    def __init__(self, make: Callable[[Comm], Compressor]):
        super().__init__(make)
        self._stand_ins: dict[Tensor, Tensor] = {}

    def __call__(self, reduction: BucketReduction) -> Pending:
        if reduction.comm.size == 1:
            return reduce_plainly(reduction)
        compressor = self.of(reduction.comm)
        layout = {self.key(param): place for param, place in reduction.layout.items()}
        average = partial(_average, compressor, reduction, layout)
        with reduction.comm.saying(reduction.label):
            handle: Pending = reduction.comm.custom("compressed_all_reduce", average, async_op=True)
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
