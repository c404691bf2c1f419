"""A bucket whose parameters and gradients are sharded alike: rank r owns chunk r of p.

    flat        | w1 ............ | w2 ... | w3 ........ | padding |        the same layout for parameters and gradients
    chunks      | rank 0        | rank 1        | rank 2           |
    shards of rank 1            | w1| w2 ... | w3 |                 a parameter is cut wherever a chunk ends

The chunks are those of a ring all-reduce. Its first half is a reduce-scatter, after which rank r has the sum of chunk r.
So each chunk is summed in the same order as in DDP's all-reduce, and the results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.comm.transport.stream import Pending
from minipar.data_parallel.buckets import Bucket
from minipar.data_parallel.partial_gradients import ReducedGradient
from minipar.data_parallel.reductions import ReduceOptions
from minipar.mesh import Placement, holds_part, placement_of, set_placement
from minipar.mesh.shard_gradient import as_shard_gradient


class ShardedBucket(Bucket):
    """A bucket in which this rank updates its own chunk of the parameters.

    weights     [n] the parameters, laid out like the gradients; each `param.data` is a view of it
    own         [n/p] this rank's chunk of `weights`
    shards      parameter -> its part of `own`, perhaps empty: a leaf tensor with a Placement and, once reduced, a `.grad`
    gradient    [n/p] the reduced gradient of `own`, or None; in `sum_dtype` if it is a sum of several backwards', else in
                the parameters' dtype
    keep_full_grads   True (stage 1): the flat gradients are kept, and `gradient` is a chunk of them. False (stage 2):
                they are freed once reduced
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        comm: Comm,
        flagged: Iterable[nn.Parameter],
        options: ReduceOptions,
        keep_full_grads: bool,
        axis: str,
    ):
        super().__init__(params, comm, flagged, options)
        self.keep_full_grads = keep_full_grads
        self.weights = torch.zeros_like(self.flat)
        self.own = self.weights[slice(*self.range)]
        self._move_params_into_weights()
        self.shards = {p: self._shard(p, axis) for p in params}
        self.gradient: Tensor | None = None
        self._accumulated: Tensor | None = None
        # Parameter -> its `param.grad` once the gradient is reduced.
        self._reduced_gradients = {p: ReducedGradient(p, x, self.sum_dtype) for p, x in self.shards.items()}
        if not keep_full_grads:
            self._free()

    @torch.no_grad()
    def _move_params_into_weights(self) -> None:
        self._weight_views = {p: self.slice_of_full(p, self.weights) for p in self.params}
        for param, view in self._weight_views.items():
            view.copy_(param)
            param.data = view
        self.comm.broadcast(self.weights, out=self.weights)

    def _shard(self, param: nn.Parameter, axis: str) -> Tensor:
        shard = self.slice_of_chunk(param, self.own).requires_grad_()
        shard.grad_dtype = None  # any: a sum of gradients may be wider than the parameter
        set_placement(shard, self.placement_of_shard(param))
        set_placement(param, placement_of(param).replicate(axis))
        return shard

    def placement_of_shard(self, param: nn.Parameter) -> Placement:
        return placement_of(param).flatten_range(*self.part(param))

    def check(self) -> None:
        """Raise RuntimeError if a parameter is no longer a view of `weights`: a step would not update it."""
        for param, view in self._weight_views.items():
            if param.data_ptr() != view.data_ptr() or param.dtype != view.dtype:
                raise RuntimeError(
                    f"the storage of {placement_of(param).name} was replaced behind ZeroOptimizer's back "
                    "(module.to(...), param.data = ...); move or cast the model before the optimizer is made"
                )

    # Gradients ------------------------------------------------------------------------------------------------

    # Once reduced, a gradient is in `shard.grad`, and `param.grad` is a ReducedGradient. Setting `param.grad` to None, as
    # `model.zero_grad()` does, drops the reduced gradient. The gradient of a later backward is reduced and added to it.

    @torch.no_grad()
    def collect(self, param: nn.Parameter) -> bool:
        """Copy the parameter's gradient, or zeros if it has none, into the flat gradients. Return whether it has one."""
        self._allocate()
        if self.gradient is not None:
            self._accumulate(self.gradient)
        reduced = param.grad
        if not isinstance(reduced, ReducedGradient):
            self._drop(param)
            return super().collect(param)
        param.grad = reduced.added
        super().collect(param)
        reduced.added, param.grad = param.grad, reduced
        return True

    def _accumulate(self, gradient: Tensor) -> None:
        """Set aside the gradient that earlier backwards reduced; the result of the next reduction is added to it."""
        self._accumulated = accumulated = gradient.to(self.sum_dtype, copy=self.keep_full_grads)
        self.gradient = None
        for param, shard in self.shards.items():
            if shard.grad is not None:
                shard.grad = self._gradient_of_shard(param, accumulated)

    def _gradient_of_shard(self, param: nn.Parameter, chunk: Tensor) -> Tensor:
        is_part = self.comm.size > 1 or holds_part(param)
        return as_shard_gradient(self.slice_of_chunk(param, chunk), is_part)

    def _drop(self, param: nn.Parameter) -> None:
        """Drop the reduced gradient of a parameter, if it has one."""
        shard = self.shards[param]
        if shard.grad is not None:
            shard.grad.zero_()
            shard.grad = None

    def drop_discarded(self) -> None:
        """Drop the reduced gradients of the parameters whose `.grad` was set to None since the reduction."""
        for param in self.params:
            if param.grad is None:
                self._drop(param)

    def reduce(self, used: set[nn.Parameter]) -> Callable[[], None]:
        """Start to reduce-scatter the collected gradients. Return a function that waits for this rank's chunk."""
        is_sum = bool(self._wide) or self._accumulated is not None
        sent = self.to_send(keep=False)
        out = sent[slice(*self.range)] if self.keep_full_grads and sent is self.flat else None
        handle = self.options.reduce(self.comm, sent, self.layout, self.label, sizes=self.sizes, out=out)
        for param in self.params:
            param.grad = self._reduced_gradients[param].added = None
        return lambda: self._store_reduced(handle.wait(), is_sum)

    @torch.no_grad()
    def _store_reduced(self, reduced: Tensor, is_sum: bool) -> None:
        dtype = self.sum_dtype if is_sum else self.flat.dtype
        if self._accumulated is not None:
            reduced = self._accumulated.add_(reduced)
            self._accumulated = None
        if not self.keep_full_grads:
            self.gradient = reduced.to(dtype)
            self._free()
        elif dtype != self.flat.dtype:
            self.gradient = reduced
        else:
            self.gradient = self.flat[slice(*self.range)]
            if self.gradient.data_ptr() != reduced.data_ptr():
                self.gradient.copy_(reduced)

    def gather(self) -> Pending:
        """Start the all-gather of the updated chunks; return its handle."""
        handle: Pending = self.comm.all_gather(
            self.own, self.sizes, self.options.algorithm, async_op=True, out=self.weights
        )
        return handle

    def write_shards(self, used: set[nn.Parameter]) -> None:
        """Set the `.grad` of the shards of `used` parameters."""
        for param, shard in self.shards.items():
            shard.grad = param.grad = None
            if param in used:
                assert self.gradient is not None
                shard.grad = self._gradient_of_shard(param, self.gradient)
                param.grad = self._reduced_gradients[param]

    def discard_grads(self) -> None:
        """Drop the gradients."""
        self.gradient = self._accumulated = None
        for param, shard in self.shards.items():
            param.grad = shard.grad = None
        if not self.keep_full_grads:
            self._free()

    def _free(self) -> None:
        self.flat.untyped_storage().resize_(0)

    def _allocate(self) -> None:
        storage = self.flat.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.flat.nbytes)
