"""The reduction of one flat buffer's gradients, from the full gradients that autograd computes to this rank's shards.

add       keep a full gradient until its unit's backward ends
reduce    start one reduce-scatter of all full gradients
advance   wait for the reduce-scatter, which frees the full gradients; start the chunk's all-reduce over replicas, if any
write     add the result to the `.grad` of the shards
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm.transport.stream import Pending
from minipar.data_parallel.buckets import require_dense
from minipar.data_parallel.flat_parameters import FlatParameters, State
from minipar.data_parallel.reductions import ReduceOptions
from minipar.mesh import holds_part
from minipar.mesh.shard_gradient import as_shard_gradient

if TYPE_CHECKING:
    from minipar.comm import Comm


class Exact(NamedTuple):
    """A shard's `.grad` as it was written, its version then, and the sum of which it is the rounded value."""

    gradient: Tensor
    version: int
    total: Tensor


class FlatGradients:
    """The gradients of one `FlatParameters`, and the state of their reduction.

    flat     the parameters
    pending  parameter -> its full gradient, not yet reduced; if it is a sum of several, in the wider of reduce_dtype and
             the shards' dtype
    reduced  [n/p] the sum of what this backward has reduced so far, or None
    """

    def __init__(self, flat: FlatParameters, options: ReduceOptions):
        self.flat, self.options, self.reduce_dtype = flat, options, options.dtype or flat.dtype
        self._sum_dtype = torch.promote_types(self.reduce_dtype, flat.dtype)
        self.pending: dict[nn.Parameter, Tensor] = {}
        self.reduced: Tensor | None = None
        self._exact: dict[nn.Parameter, Exact] = {}
        self._reducing: Pending | None = None  # the collective under way
        self._comms_left: list[Comm] = []  # the Comms over which to all-reduce afterwards

    @torch.no_grad()
    def add(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a full gradient to the pending gradients. The tensor may be kept, and changed in place."""
        gradient, before = require_dense(param, gradient), self.pending.get(param)
        self.pending[param] = gradient if before is None else before.to(self._sum_dtype).add_(gradient)

    @torch.no_grad()
    def reduce(self) -> None:
        """Start to reduce the pending gradients; a missing gradient counts as zero.

        Sends (p-1)/p n elements.
        """
        flat = self.flat
        if not flat.trained:
            return
        gradients = torch.empty(flat.size, dtype=self.reduce_dtype, device=flat.device)
        for param in flat.params:
            place, gradient = flat.slice_of_full(param, gradients), self.pending.pop(param, None)
            place.zero_() if gradient is None else place.copy_(gradient)
        self.finish()
        self._comms_left = list(flat.comms)
        self._start(gradients, None if flat.whole else flat.sizes)

    def _start(self, x: Tensor, sizes: list[int] | None = None) -> None:
        """Start to reduce-scatter the gradients or, without `sizes`, to all-reduce whole ones or a chunk."""
        flat, comm = self.flat, self._comms_left.pop(0)
        self._reducing = self.options.reduce(comm, x, flat.layout, flat.label, sizes=sizes)

    def advance(self) -> bool:
        """Wait for the collective under way, and start the next one. Return whether there was a next one."""
        if self._reducing is None:
            return False
        chunk, self._reducing = self._reducing.wait(), None
        if self._comms_left:
            self._start(chunk)
        else:
            self._keep(chunk)
        return self._reducing is not None

    def finish(self) -> None:
        while self.advance():
            pass

    @torch.no_grad()
    def _keep(self, chunk: Tensor) -> None:
        chunk = chunk.to(self.flat.own.device, self._sum_dtype)
        self.reduced = chunk if self.reduced is None else self.reduced.add_(chunk)

    @torch.no_grad()
    def write(self, used: set[nn.Parameter]) -> None:
        """Add the reduced gradients to the shards' `.grad`, except for parameters that no rank used."""
        flat = self.flat
        assert self._reducing is None
        assert flat.state is not State.UNSHARDED
        chunk, self.reduced = self.reduced, None
        if chunk is None:
            return
        for param in flat.params:
            if param in used:
                sharded = flat.comm is not None and flat.comm.size > 1
                self._add_to_shard(param, flat.slice_of_chunk(param, chunk), sharded or holds_part(param))

    def _add_to_shard(self, param: nn.Parameter, part: Tensor, is_part: bool) -> None:
        """Add to the shard's `.grad`, in `_sum_dtype` if nobody has changed it since: in bf16, 256 + 1 is 256."""
        gradient, exact = param.grad, self._exact.pop(param, None)
        if self._sum_dtype == self.flat.dtype:
            param.grad = as_shard_gradient(part, is_part) if gradient is None else gradient.add_(part)
            return
        if gradient is not None:
            unchanged = (
                exact is not None and exact.gradient is gradient and exact.version == gradient._version
            )
            part = part.add_(exact.total if exact is not None and unchanged else gradient)
        param.grad = rounded = as_shard_gradient(part.to(self.flat.dtype), is_part)
        self._exact[param] = Exact(rounded, rounded._version, part)

    def discard(self) -> None:
        """Drop gradients that were not reduced, and reduced gradients that were not written."""
        self._reducing = self.reduced = None
        self.pending.clear()
