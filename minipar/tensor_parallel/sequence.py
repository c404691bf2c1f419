"""Sequence parallelism: outside the split matrices, every rank holds the activations of its own tokens.

`simple/sequence_parallel.py`, plus gathers and scatters that are started early, dropout, stages of a pipeline.

    tensor parallel                 x [B, T, D] on every rank     all-reduce after each row-parallel matrix
    with sequence parallelism       x [B, T/tp, D]                reduce-scatter after it, all-gather before the next

An all-reduce is a reduce-scatter and an all-gather, so no byte is added forward; but norms, dropouts and residuals now
work on, and keep, 1/tp of the tokens. What a rank computes there from a weight that all of them share (a norm's) is a
part of the weight's gradient: it is summed by the copy operator on the weight.

Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minipar.comm import autograd
from minipar.errors import require_divides
from minipar.model.block import Block
from minipar.model.norm import RMSNorm, rms_norm

TOKENS = -2  # the dim of the tokens in [B, T, D]


def reduce_scatter_tokens(comm, x: Tensor) -> Tensor:
    """This rank's tokens of the sum over ranks: x [B, T, D] -> [B, T/tp, D]. Backward: all-gather.

    Sends (tp-1)/tp * B*T*D elements, and as many backward.
    """
    require_divides("tp", comm.size, "tokens", x.shape[TOKENS])
    return autograd.reduce_scatter(comm, x, dim=TOKENS)


def start_gather_tokens(comm, x: Tensor) -> Callable[[], Tensor]:
    """Begin to gather shards [B, T/tp, D]; call the result for the whole [B, T, D]."""
    pending = comm.all_gather(x.transpose(0, TOKENS), async_op=True)
    return lambda: pending.wait().transpose(0, TOKENS).contiguous()


def start_reduce_scatter_tokens(comm, x: Tensor) -> Callable[[], Tensor]:
    """Begin to sum x [B, T, D] over ranks; call the result for this rank's tokens of it, [B, T/tp, D]."""
    pending = comm.reduce_scatter(x.transpose(0, TOKENS).contiguous(), async_op=True)
    return lambda: pending.wait().transpose(0, TOKENS).contiguous()


class ShardRMSNorm(RMSNorm):
    """RMSNorm of this rank's tokens, by a weight that all ranks share.

    x, y  [B, T/tp, D]    w  [D]    backward   dw = sum over ranks of each one's part    one all-reduce of D elements
    """

    def __init__(self, norm: RMSNorm, comm):
        torch.nn.Module.__init__(self)
        self.eps, self.weight, self.comm = norm.eps, norm.weight, comm

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, autograd.copy(self.comm, self.weight), self.eps)


class ShardDropout:
    """A block's dropout for this rank's tokens [B, T/tp, D]: the same elements fall as in one process."""

    def __init__(self, block: Block, comm):
        self.dropout, self.comm = block.dropout, comm

    def __call__(self, x: Tensor, site: int, positions: Tensor, sample_ids: Tensor, step: int) -> Tensor:
        tokens = x.shape[TOKENS]
        mine = positions.narrow(-1, self.comm.rank * tokens, tokens)
        return self.dropout(x, site, mine, sample_ids, step)


class ShardLength:
    """How many tokens a sample has: a first stage is given all of them, a later one the shards of hidden states."""

    def __init__(self, first: bool, comm):
        self.first, self.comm = first, comm

    def __call__(self, x: Tensor) -> int:
        if not self.first:
            return x.shape[1] * self.comm.size
        require_divides("tp", self.comm.size, "the tokens of a sample", x.shape[1])
        return x.shape[1]
