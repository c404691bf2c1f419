"""Buckets of gradients: one all-reduce per parameter wastes latency, and a single all-reduce cannot overlap the backward.

A bucket is one flat buffer with a view for every parameter in it. The views become the parameters' gradients, so
reducing the buffer reduces them all. Parameters fill buckets in reverse order of registration, which is roughly the
order in which a backward computes their gradients. The first bucket is small, so that communication begins early.
Source: PyTorch DDP, arXiv:2006.15704, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel.flat_layout import FlatLayout, round_up
from minipar.data_parallel.partial_gradients import ReducedGradient
from minipar.data_parallel.reductions import PLAIN_MEAN, ReduceOptions
from minipar.mesh import holds_part, placement_of
from minipar.mesh.shard_gradient import as_shard_gradient
from minipar.support.staging import to_device

ALIGNMENT_BYTES = 64  # views and chunks start at multiples of a cache line, which also suits vector loads

Key = tuple[Comm, torch.dtype, torch.device]  # what the parameters of a bucket have in common

# Comm -> how many buckets were made over it: two wrappers' parameters may have the same names.
NUM_BUCKETS: WeakKeyDictionary[Comm, int] = WeakKeyDictionary()


class Bucket(FlatLayout):
    """Parameters of one dtype that one Comm reduces together.

    flat    the gradients, each view starting at a multiple of 64 bytes; then, in the last bucket of its Comm and dtype, one
            flag per parameter of that Comm and dtype; then padding, so that the ranks' ring chunks are equal and aligned
    views   parameter -> its part of `flat`, in the parameter's shape
    reduce_dtype  the dtype in which gradients are summed over ranks
    sum_dtype     the dtype in which several gradients of a parameter add up: the wider of `reduce_dtype` and `flat`'s own
    flags   one per parameter of `flagged`: after the reduction, nonzero if any rank has a gradient. Empty if the bucket is
            not the last. ZeRO does not read the flags; it has them so that its chunks and order of addition are DDP's
    """

    comm: Comm

    def __init__(
        self,
        params: list[nn.Parameter],
        comm: Comm,
        flagged: Iterable[nn.Parameter] = (),
        options: ReduceOptions = PLAIN_MEAN,
    ):
        self.comm, self.flagged, self.options = comm, list(flagged), options
        self.number = NUM_BUCKETS[comm] = NUM_BUCKETS.get(comm, 0) + 1
        dtype = params[0].dtype
        super().__init__(params, comm, ALIGNMENT_BYTES // dtype.itemsize, len(self.flagged))
        self.flat = torch.zeros(self.size, dtype=dtype, device=params[0].device)
        self.reduce_dtype = options.dtype or dtype
        self.sum_dtype = torch.promote_types(self.reduce_dtype, dtype)
        # `.data`, so that each view's version counter counts its own changes only, not those of the other views.
        self.views = {
            p: as_shard_gradient(self.slice_of_full(p, self.flat.data), holds_part(p)) for p in params
        }
        self.flags = self.flat[self.end : self.end + len(self.flagged)]
        # Parameter -> version of its view when its gradient was last reduced.
        self._reduced_versions: dict[nn.Parameter, int] = {}
        # Parameter -> its reduced gradient, to restore if no rank adds to it.
        self._kept: dict[nn.Parameter, Tensor] = {}
        # Parameter -> its gradient in sum_dtype: collected, and in place of its view the one to reduce; or reduced.
        self._wide: dict[nn.Parameter, Tensor] = {}
        self._exact: dict[nn.Parameter, Tensor] = {}

    def widen(self, param: nn.Parameter) -> None:
        """Before a gradient is added to another one, make that one's dtype `sum_dtype`: in bf16, 256 + 1 is 256."""
        gradient = param.grad
        if gradient is None or isinstance(gradient, ReducedGradient) or gradient.dtype == self.sum_dtype:
            return
        exact = self._exact.pop(param, None)
        view = self.views[param]
        unchanged = (
            gradient.data_ptr() == view.data_ptr() and self._reduced_versions.get(param) == view._version
        )
        param.grad = exact if exact is not None and unchanged else gradient.to(self.sum_dtype)

    @property
    def label(self) -> str:
        """Name the bucket in its reduction, so that ranks that reduce two wrappers' buckets in other orders are told."""
        return f"bucket {self.number}, of {placement_of(self.params[0]).name},"

    def collect(self, param: nn.Parameter) -> bool:
        """Copy the parameter's gradient into its view and make the view its `.grad`. Return True if it is to be reduced.

        If there is no gradient, zero the view. If nothing was added since the gradient was reduced, the view stays, so that
        all ranks get the same sum if another rank has added to its own; if none has, `write` restores the gradient.
        Raises RuntimeError if the parameter was cast after it was wrapped.
        """
        view, gradient = self.views[param], param.grad
        self._kept.pop(param, None)  # of a backward that an exception ended
        self._wide.pop(param, None)
        if param.dtype != view.dtype:
            raise RuntimeError(
                f"{placement_of(param).name} was cast from {view.dtype} to {param.dtype} after it was wrapped; cast the "
                "model first, then make DDP or ZeroOptimizer"
            )
        if gradient is None:
            view.zero_()
        elif gradient.dtype != view.dtype:
            self._wide[param] = gradient.detach()
        elif require_dense(param, gradient).data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())
            param.grad = view
        elif self._reduced_versions.get(param) == view._version:
            self._kept[param] = view.clone()
            if param in self._exact:
                self._wide[param] = self._exact[param]
            return False
        self._exact.pop(param, None)
        return gradient is not None

    def to_send(self, keep: bool) -> Tensor:
        """Return the collected gradients in `reduce_dtype`: `flat` itself if nothing has to be cast.

        keep  the tensor returned will hold the result: remember that of the sums, to add later gradients to it
        """
        sent = self.flat.to(self.reduce_dtype)
        wide, self._wide, self._exact = self._wide, {}, {}
        for param, gradient in wide.items():
            part = self.slice_of_full(param, sent)
            part.copy_(gradient)
            if keep:
                self._exact[param] = part
        return sent

    def reduce(self, used: set[nn.Parameter]) -> Callable[[], None]:
        """Start to all-reduce the collected gradients and flags. Return a function that waits for the result in `flat`."""
        if self.flagged:
            used_here = torch.tensor([float(p in used) for p in self.flagged])
            self.flags.copy_(to_device(used_here, self.flags.device))
        sent = self.to_send(keep=True)
        flags = sent[self.end :] if self.flagged else None
        handle = self.options.reduce(self.comm, sent, self.layout, self.label, flags=flags)

        def wait() -> None:
            handle.wait()
            if sent is not self.flat:
                self.flat.copy_(sent)

        return wait

    def write(self, param: nn.Parameter, used: bool) -> None:
        """After the reduction, make the view the gradient if any rank used the parameter, else restore the old gradient."""
        view, kept = self.views[param], self._kept.pop(param, None)
        if used:
            param.grad = view
        elif kept is not None:
            view.copy_(kept)
        self._reduced_versions[param] = view._version


B = TypeVar("B", bound=Bucket)


def make_buckets(
    params: Iterable[nn.Parameter],
    comm_of: Callable[[nn.Parameter], Comm],
    bucket_bytes: int,
    first_bucket_bytes: int,
    make: Callable[[list[nn.Parameter], Comm, Iterable[nn.Parameter]], B],
) -> list[B]:
    """Group parameters into buckets of at most `bucket_bytes`, in the order in which the buckets are reduced.

    A larger parameter has its own bucket. Parameters share a bucket only if they have the same Comm, dtype and device.
    """
    filling: dict[Key, list[nn.Parameter]] = {}  # key -> the bucket being filled
    groups: dict[Key, list[nn.Parameter]] = {}
    contents: list[tuple[Key, list[nn.Parameter]]] = []  # full buckets, in order
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
        make(params, key[0], groups[key] if last[key] == i else ())
        for i, (key, params) in enumerate(contents)
    ]


def require_dense(param: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return the gradient. Raises RuntimeError if it is sparse: a flat buffer holds dense gradients."""
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {placement_of(param).name} is sparse; use nn.Embedding(..., sparse=False)"
        )
    return gradient


def flat_bytes(params: Sequence[Tensor], comm_size: int, num_flags: int = 0) -> int:
    """Return the bytes of the flat buffer of a bucket with these parameters. Tests compare `Bucket` with this formula."""
    itemsize = params[0].element_size()
    gradients = sum(round_up(p.nbytes, ALIGNMENT_BYTES) for p in params)
    return round_up(gradients + num_flags * itemsize, ALIGNMENT_BYTES * comm_size)
