"""The reduction of a flat buffer of gradients: the one place where DDP, ZeroOptimizer and FSDP send gradients.

Their argument `reduce_bucket` takes the place of `reduce_plainly`. It may send something else, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.transport.stream import Pending
from minipar.data_parallel.flat_layout import Layout
from minipar.support.errors import one_of


class BucketReduction(NamedTuple):
    """A flat buffer of gradients to be reduced over the ranks of `comm`.

    flat    [n] this rank's gradients; the reduction may overwrite them
    layout  parameter -> (start, number of elements) of its gradient in `flat`; between gradients is padding
    op      "mean" or "sum" over the ranks
    label   says in messages and errors which bucket it is
    sizes   None: every rank gets the whole result, in `flat`. Else rank r gets chunk r, of sizes[r] elements
    out     None, or where to put the chunk
    flags   the part of `flat` behind the gradients that has to be summed too; nonzero counts, not the number
    """

    comm: Comm
    flat: Tensor
    layout: Layout
    op: str
    algorithm: str
    label: str
    sizes: Sequence[int] | None = None
    out: Tensor | None = None
    flags: Tensor | None = None


# Starts a reduction. The handle's `wait()` returns `flat` or, where `sizes` are given, this rank's chunk, in memory of its
# own or in `out`: that of `flat` may be freed then.
ReduceBucket = Callable[[BucketReduction], Pending]


def reduce_plainly(reduction: BucketReduction) -> Pending:
    """All-reduce `flat` in place or, where `sizes` are given, reduce-scatter it. Sends 2(p-1)/p or (p-1)/p of it."""
    comm, flat, _, op, algorithm, label, sizes, out, _ = reduction
    handle: Pending
    with comm.saying(label):
        if sizes is None:
            handle = comm.all_reduce_(flat, op, algorithm=algorithm, async_op=True)
        else:
            handle = comm.reduce_scatter(flat, op, sizes, algorithm, out=out, async_op=True)
    return handle


class ReduceOptions(NamedTuple):
    """The arguments with which DDP, ZeroOptimizer and FSDP say how gradients are reduced."""

    op: str = "mean"
    algorithm: str = "auto"
    dtype: torch.dtype | None = None
    start: ReduceBucket = reduce_plainly

    @classmethod
    def of(
        cls, reduce: str, algorithm: str, dtype: torch.dtype | None, reduce_bucket: ReduceBucket | None
    ) -> ReduceOptions:
        """Raises ValueError unless `reduce` is "mean" or "sum"."""
        if reduce not in ("mean", "sum"):
            raise ValueError(f"reduce={reduce!r} is unknown; use {one_of(('mean', 'sum'))}")
        return cls(reduce, algorithm, dtype, reduce_bucket or reduce_plainly)

    def reduce(self, comm: Comm, flat: Tensor, layout: Layout, label: str, **more: Any) -> Pending:
        """Start to reduce a flat buffer; `more` are the other fields of `BucketReduction`."""
        return self.start(BucketReduction(comm, flat, layout, self.op, self.algorithm, label, **more))


PLAIN_MEAN = ReduceOptions()
