"""Buckets of gradients: an all-reduce per parameter wastes latency, and one all-reduce for all cannot overlap the backward.

A bucket is one flat buffer with a view for every parameter in it. The views become the parameters' gradients, so
reducing the buffer reduces them all. Parameters fill buckets in reverse order of registration, which is roughly the
order in which a backward computes their gradients. The first bucket is small, so that communication begins early.
Source: PyTorch DDP, arXiv:2006.15704, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from minipar.mesh import placement_of

ALIGNMENT_BYTES = 64  # of every view and chunk: a cache line, and enough for vector loads


class Bucket:
    """Parameters of one dtype that one Comm reduces together.

    flat    the gradients, each view starting at a multiple of 64 bytes; then, in the last bucket of its Comm and dtype, one
            flag per parameter of that Comm and dtype; then padding, so that the ranks' ring chunks are equal and aligned
    views   parameter -> its part of `flat`, in the parameter's shape
    flags   for each parameter of `flagged`: nonzero, once reduced, if any rank has a gradient. Empty in other buckets.
            ZeRO has them too, unused, so that its chunks, and the order in which ranks add, are those of DDP
    """

    def __init__(self, params: list[nn.Parameter], comm, flagged: list[nn.Parameter] = ()):
        self.params, self.comm, self.flagged = params, comm, list(flagged)
        dtype, device = params[0].dtype, params[0].device
        step = ALIGNMENT_BYTES // dtype.itemsize
        starts, end = [], 0
        for param in params:
            starts.append(end)
            end = _round_up(end + param.numel(), step)
        self.flat = torch.zeros(_round_up(end + len(flagged), step * comm.size), dtype=dtype, device=device)
        # `.data`: each view counts its own changes, and not those of the other views.
        self.views = {p: self.flat.data[i : i + p.numel()].view(p.shape) for i, p in zip(starts, params)}
        self.flags = self.flat[end : end + len(flagged)]
        self._reduced: dict[
            nn.Parameter, int
        ] = {}  # parameter -> version of its view when its gradient was reduced
        self._kept: dict[nn.Parameter, Tensor] = {}  # reduced gradients set aside while others are reduced

    @torch.no_grad()
    def collect(self, param: nn.Parameter) -> bool:
        """Copy the parameter's gradient into its view and make the view its `.grad`. Return whether there is one to reduce.

        Without a gradient, zero the view; also where it was reduced before and nothing was added: `write` restores it.
        """
        view, gradient = self.views[param], param.grad
        if gradient is None:
            view.zero_()
        elif require_dense(param, gradient).data_ptr() != view.data_ptr():
            view.copy_(gradient)
            param.grad = view
        elif self._reduced.get(param) == view._version:
            self._kept[param] = view.clone()
            view.zero_()
            return False
        return gradient is not None

    @torch.no_grad()
    def average(self, sent: Tensor, compressor, reduce: str) -> Tensor:
        """Replace the gradients in `sent`, laid out as `flat`, by the compressor's means, or sums; return it."""
        parts = {}
        for param, view in self.views.items():
            start = view.storage_offset()
            parts[param] = sent[start : start + view.numel()].view(view.shape)
        for param, mean in compressor.means(parts).items():
            parts[param].copy_(mean if reduce == "mean" else mean * self.comm.size)
        return sent

    @torch.no_grad()
    def write(self, param: nn.Parameter, used: bool) -> None:
        """After the reduction, make the view the gradient of a parameter that any rank used; restore that of another."""
        view, kept = self.views[param], self._kept.pop(param, None)
        if kept is not None:
            view.add_(kept) if used else view.copy_(kept)
        if used:
            param.grad = view
        self._reduced[param] = view._version


def make_buckets(
    params: Iterable[nn.Parameter],
    comm_of: Callable[[nn.Parameter], object],
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> list[Bucket]:
    """Group parameters into buckets of at most `bucket_bytes`, in the order to reduce them.

    A parameter larger than that has its own bucket. A bucket has one Comm, dtype and device; each combination of these
    fills buckets of its own.
    """
    filling: dict[tuple, list[nn.Parameter]] = {}  # (comm, dtype) -> the bucket being filled
    groups: dict[tuple, list[nn.Parameter]] = {}
    contents: list[tuple[tuple, list[nn.Parameter]]] = []  # full buckets, in order
    for param in reversed(list(params)):
        key = (comm_of(param), param.dtype, param.device)
        groups.setdefault(key, []).append(param)
        current = filling.setdefault(key, [])
        limit = bucket_bytes if contents else min(first_bucket_bytes, bucket_bytes)
        if current and sum(p.nbytes for p in current) + param.nbytes > limit:
            contents.append((key, current))
            current = filling[key] = []
        current.append(param)
    contents += filling.items()
    last = {key: i for i, (key, _) in enumerate(contents)}
    return [
        Bucket(params, key[0], groups[key] if last[key] == i else ())
        for i, (key, params) in enumerate(contents)
    ]


def require_dense(param: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return the gradient. Raises RuntimeError where it is sparse, since it then has no place in a flat buffer."""
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {placement_of(param).name} is sparse; use nn.Embedding(..., sparse=False)"
        )
    return gradient


def flat_bytes(params: list[Tensor], comm_size: int, num_flags: int = 0) -> int:
    """Bytes of the flat buffer of a bucket of these parameters: the formula `Bucket` is tested against."""
    itemsize = params[0].element_size()
    gradients = sum(_round_up(p.nbytes, ALIGNMENT_BYTES) for p in params)
    return _round_up(gradients + num_flags * itemsize, ALIGNMENT_BYTES * comm_size)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def range_in_param(start: int, num_elems: int, chunk: tuple[int, int]) -> tuple[int, int]:
    """Return (start, end) of the elements of a flattened tensor that lie in `chunk`.

    The tensor begins at `start` of a flat buffer; `chunk` is a (start, end) of that buffer.
    """
    low, high = (min(max(edge - start, 0), num_elems) for edge in chunk)
    return low, high


def slice_of_chunk(start: int, num_elems: int, chunk: tuple[int, int]) -> slice:
    """Return the same part as a slice of the chunk; empty where the tensor and the chunk do not overlap."""
    low, high = range_in_param(start, num_elems, chunk)
    at = start + low - chunk[0] if high > low else 0
    return slice(at, at + high - low)
