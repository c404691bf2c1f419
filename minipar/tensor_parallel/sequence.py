"""Sequence parallelism: outside the split matrices, every rank holds the activations of its own tokens.

Adds to `simple/sequence_parallel.py`: asynchronous all-gathers and reduce-scatters, dropout, pipeline stages.

    tensor parallel                 x [B, T, D] on every rank     all-reduce after each row-parallel matrix
    with sequence parallelism       x [B, T/tp, D]                reduce-scatter after it, all-gather before the next

An all-reduce is a reduce-scatter and an all-gather, so the forward sends no more bytes; but norms, dropouts and residuals
now compute on, and keep, only 1/tp of the tokens. Every rank holds a norm's whole weight, but computes the weight's
gradient from its own tokens only, so the copy operator on the weight sums that gradient over ranks.

Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minipar.comm import Comm, autograd
from minipar.model.block import Block
from minipar.model.deferrable_linear import Linear, linear
from minipar.model.norm import RMSNorm, rms_norm
from minipar.support.errors import require_divides

TOKEN_DIM = -2  # the dim of the tokens in [B, T, D]


def reduce_scatter_tokens(comm: Comm, x: Tensor) -> Tensor:
    """Sum x over ranks and keep this rank's tokens: [B, T, D] -> [B, T/tp, D]. Backward: all-gather.

    Sends (tp-1)/tp * B*T*D elements, and as many backward.
    """
    require_divides("tp", comm.size, "tokens", x.shape[TOKEN_DIM])
    return autograd.reduce_scatter(comm, x, dim=TOKEN_DIM)


def start_gather_tokens(comm: Comm, x: Tensor) -> Callable[[], Tensor]:
    """Start to all-gather x [B, T/tp, D]; the returned function waits and returns the whole [B, T, D]."""
    pending = comm.all_gather(x.transpose(0, TOKEN_DIM), async_op=True)
    return lambda: pending.wait().transpose(0, TOKEN_DIM).contiguous()


def start_reduce_scatter_tokens(comm: Comm, x: Tensor) -> Callable[[], Tensor]:
    """Start to reduce-scatter x [B, T, D]; the returned function waits and returns this rank's tokens [B, T/tp, D]."""
    pending = comm.reduce_scatter(x.transpose(0, TOKEN_DIM).contiguous(), async_op=True)
    return lambda: pending.wait().transpose(0, TOKEN_DIM).contiguous()


class SequenceParallelRMSNorm(RMSNorm):
    """RMSNorm on this rank's tokens or, of queries and keys, its heads, with a weight that is not sharded.

    x, y  [B, T/tp, D] or [B, T, heads/tp, d]    w  [D] or [d]

    backward   dw = sum over ranks of the dw from each rank's part    one all-reduce of D elements
    """

    def __init__(self, norm: RMSNorm, comm: Comm):
        torch.nn.Module.__init__(self)
        self.eps, self.weight, self.comm = norm.eps, norm.weight, comm

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, autograd.copy(self.comm, self.weight), self.eps)


class SequenceParallelLinear(Linear):
    """A linear layer on this rank's tokens, with a weight that is not sharded.

    x  [B, T/tp, D]    w  [F, D]    y  [B, T/tp, F]

    backward   dw = sum over ranks of the dw from each rank's tokens    one all-reduce of F*D elements, never deferred
    """

    def __init__(self, whole: Linear, comm: Comm):
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = whole.weight.shape
        self.weight, self.comm = whole.weight, comm
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, autograd.copy(self.comm, self.weight))


class SequenceParallelDropout:
    """A block's dropout for this rank's tokens [B, T/tp, D]: it drops the same elements as in one process."""

    def __init__(self, block: Block, comm: Comm):
        self.dropout, self.comm = block.dropout, comm

    def __call__(self, x: Tensor, site: int, indices: Tensor, sample_ids: Tensor, step: int) -> Tensor:
        tokens = x.shape[TOKEN_DIM]
        mine = indices.narrow(-1, self.comm.rank * tokens, tokens)
        return self.dropout(x, site, mine, sample_ids, step)


class SequenceParallelLength:
    """Return a sample's tokens, from a stage's input: tokens [B, T] in the first stage, else hidden [B, T/tp, D]."""

    def __init__(self, first: bool, comm: Comm):
        self.first, self.comm = first, comm

    def __call__(self, x: Tensor) -> int:
        if not self.first:
            return x.shape[1] * self.comm.size
        require_divides("tp", self.comm.size, "the tokens of a sample", x.shape[1])
        return x.shape[1]
