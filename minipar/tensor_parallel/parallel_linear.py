"""Column-parallel and row-parallel linear layers, which are used in pairs.

Adds to `simple/tensor_parallel.py`: biases, gathered outputs, sequence parallelism, features shared by several ranks.

    column parallel   y = x w^T, w split by output features: each rank computes its own features of y
    row parallel      y = x w^T, w split by input features: each rank computes one term of the sum over ranks

A column-parallel layer, elementwise operations and a row-parallel layer need no communication in between: the forward
needs one all-reduce, of the pair's output, and the backward one, of the gradient of the pair's input.

Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from minipar.comm import Comm, autograd
from minipar.mesh import place_whole
from minipar.model.deferrable_linear import Linear, linear
from minipar.support.errors import require_divides
from minipar.tensor_parallel.chunked import gather_matmul, matmul_scatter
from minipar.tensor_parallel.column import ShardedWeight, column_parallel
from minipar.tensor_parallel.sequence import reduce_scatter_tokens
from minipar.tensor_parallel.shards import replicate_parameter, shard_parameter


class ColumnParallelLinear(Linear):
    """A linear layer with its output features split: rank r computes features r*F/tp ... of y = x w^T + b.

    x  [B, T, D] on every rank    w  [F/tp, D]    b  [F/tp]    y  [B, T, F/tp]; with `gather_output` [B, T, F]

    num_shards         number of shards of the features, default tp. If it is smaller, tp/num_shards neighbouring ranks hold
                       each shard and sum its gradient
    sequence_parallel  x is this rank's tokens [B, T/tp, D], and is gathered here
    chunked            gather x in chunks, overlapped with the products
    uneven             let shards differ in size, as torch.chunk splits; the output can then not be gathered

    Sends what `column_parallel` sends; to gather the output, (tp-1)/tp * B*T*F elements more.
    Raises ValueError if num_shards does not divide tp, or does not divide F unless `uneven`.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        comm: Comm,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        chunked: bool = False,
        replicas: Comm | None = None,
    ):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.comm, self.replicas = weight, comm, replicas
        self.register_parameter("bias", bias)
        self.gather_output, self.sequence_parallel, self.chunked = gather_output, sequence_parallel, chunked

    @classmethod
    def from_linear(
        cls,
        linear: Linear | nn.Linear,
        comm: Comm,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        chunked: bool = False,
        num_shards: int | None = None,
        uneven: bool = False,
    ) -> ColumnParallelLinear:
        """Keep this rank's shard of `linear`, an unsharded layer that is the same on every rank."""
        num_shards = num_shards or comm.size
        if not uneven:
            what = "tp" if num_shards == comm.size else "num_shards"
            require_divides(what, num_shards, "out_features", linear.weight.shape[0])
        require_divides("num_shards", num_shards, "tp", comm.size)
        place_whole(linear)
        ranks_per_shard = comm.size // num_shards
        index = comm.rank // ranks_per_shard
        cut = partial(shard_parameter, dim=0, index=index, count=num_shards, copies=ranks_per_shard > 1)
        ranks = range(index * ranks_per_shard, (index + 1) * ranks_per_shard)
        replicas = comm.subgroup(ranks, "replicas") if ranks_per_shard > 1 else None
        bias = None if linear.bias is None else cut(linear.bias)
        return cls(cut(linear.weight), bias, comm, gather_output, sequence_parallel, chunked, replicas)

    def sharded_weight(self) -> ShardedWeight:
        return ShardedWeight(self.weight, self.deferred, self.replicas, self.products)

    def add_bias(self, y: Tensor) -> Tensor:
        if self.bias is None:
            return y
        bias = self.bias if self.replicas is None else autograd.copy(self.replicas, self.bias)
        return y + bias.to(y.dtype)  # as torch.autocast adds a bias

    def forward(self, x: Tensor) -> Tensor:
        (y,) = project_together((self,), x)
        return autograd.gather(self.comm, y, dim=-1) if self.gather_output else y


def project_together(layers: Sequence[ColumnParallelLinear], x: Tensor) -> tuple[Tensor, ...]:
    """Apply several column-parallel layers to one input with one copy operator, so that dx is summed over ranks once."""
    first, matrices = layers[0], [layer.sharded_weight() for layer in layers]
    if first.sequence_parallel and first.chunked:
        ys = gather_matmul(first.comm, x, matrices)
    else:
        ys = column_parallel(first.comm, x, matrices, first.sequence_parallel)
    return tuple(layer.add_bias(y) for layer, y in zip(layers, ys))


class RowParallelLinear(Linear):
    """A linear layer with its input features split: y = sum over ranks of x w^T, and b added once.

    x  [B, T, D/tp]; [B, T, D] where not `input_is_parallel`    w  [F, D/tp]    b  [F] on every rank
    y  [B, T, F] on every rank; with `sequence_parallel` this rank's tokens [B, T/tp, F]; `chunked`: summed in chunks

    backward   dx = dy w, dw = dy^T x    local; with `sequence_parallel`, dy is gathered

    Sends 2(tp-1)/tp * B*T*F elements forward; with `sequence_parallel`, half of that forward and half backward. Where not
    `input_is_parallel`, the backward also gathers the gradient of x, which sends (tp-1)/tp * B*T*D elements.
    Raises ValueError if tp does not divide D.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        comm: Comm,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        chunked: bool = False,
    ):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.comm = weight, comm
        self.register_parameter("bias", bias)
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel, self.chunked = sequence_parallel, chunked

    @classmethod
    def from_linear(
        cls,
        linear: Linear | nn.Linear,
        comm: Comm,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        chunked: bool = False,
    ) -> RowParallelLinear:
        """Keep this rank's shard of `linear`, an unsharded layer that is the same on every rank."""
        require_divides("tp", comm.size, "in_features", linear.weight.shape[1])
        place_whole(linear)
        weight = shard_parameter(linear.weight, 1, comm.rank, comm.size)
        bias = None if linear.bias is None else replicate_parameter(linear.bias)
        return cls(weight, bias, comm, input_is_parallel, sequence_parallel, chunked)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = autograd.split(self.comm, x, dim=-1)
        return self.add_bias(self._sum_over_ranks(x))

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        if self.sequence_parallel and self.chunked:
            return matmul_scatter(self.comm, x, self.weight, self.deferred)
        term = linear(x, self.weight, None, self.deferred, self.products)
        if self.sequence_parallel:
            return reduce_scatter_tokens(self.comm, term)
        return autograd.all_reduce(self.comm, term)

    def add_bias(self, y: Tensor) -> Tensor:
        if self.bias is None:
            return y
        # Under sequence parallelism b is added to this rank's tokens only; the copy operator sums its gradient over ranks.
        bias = autograd.copy(self.comm, self.bias) if self.sequence_parallel else self.bias
        return y + bias.to(y.dtype)


def sum_together(layers: Sequence[RowParallelLinear], xs: Sequence[Tensor]) -> Tensor:
    """Apply row-parallel layers to one input each, and add their outputs, with a single sum over ranks.

    Under sequence parallelism the sum is one reduce-scatter, which `chunked` does not cut into chunks.
    """
    first = layers[0]
    terms = [linear(x, layer.weight, None, layer.deferred, layer.products) for layer, x in zip(layers, xs)]
    sum_over_ranks = reduce_scatter_tokens if first.sequence_parallel else autograd.all_reduce
    y = sum_over_ranks(first.comm, sum(terms[1:], terms[0]))
    for layer in layers:
        y = layer.add_bias(y)
    return y
