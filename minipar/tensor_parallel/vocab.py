"""Embedding and loss with the vocabulary split over ranks.

Adds to `simple/vocab.py`: vocabularies that tp does not divide, ignored targets, label smoothing, and a loss that needs no
second tensor of the logits' size.

The logits are the largest tensor of a training step: [B, T, V], with V around 100,000. In training no rank holds all
logits: the loss needs only three numbers per token from the other ranks.

Source: Megatron-LM, arXiv:1909.08053, section 3 (the embedding, and the fused loss).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import Comm, autograd
from minipar.mesh import place_whole
from minipar.model.deferrable_linear import TiedHead
from minipar.model.transformer import IGNORE_INDEX
from minipar.model.vocabulary import check_vocabulary
from minipar.support.chunks import bounds, chunk_sizes
from minipar.support.errors import one_of, require_divides
from minipar.tensor_parallel.column import ShardedWeight, column_parallel
from minipar.tensor_parallel.sequence import reduce_scatter_tokens
from minipar.tensor_parallel.shards import shard_parameter

# Number of logits turned into probabilities at a time, so that no temporary tensor is as large as all logits.
BLOCK_ELEMS = 1 << 20


class VocabParallelEmbedding(nn.Module):
    """An embedding with its rows split: each rank looks up the tokens of its own rows, else 0; ranks sum the results.

    tokens  [B, T] int64 on every rank    w  [V/tp, D], split as torch.chunk splits
    y       [B, T, D] on every rank; with `sequence_parallel` this rank's tokens [B, T/tp, D]

    backward   dw[v] = sum of dy over the occurrences of token v    local; with `sequence_parallel` dy is gathered
               dw[padding_idx] = 0, as in torch                     where an embedding with `padding_idx` was split

    Sends 2(tp-1)/tp * B*T*D elements forward; with `sequence_parallel`, half of that forward and half backward.
    Raises ValueError if a token is not in the vocabulary.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        vocab_size: int,
        comm: Comm,
        sequence_parallel: bool = False,
        padding_idx: int | None = None,
    ):
        super().__init__()
        self.weight, self.vocab_size, self.comm = weight, vocab_size, comm
        self.first_token = vocab_bounds(vocab_size, comm.size)[comm.rank]
        row = -1 if padding_idx is None else padding_idx - self.first_token
        self._padding_row = row if 0 <= row < weight.shape[0] else None
        self.sequence_parallel = sequence_parallel

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, comm: Comm, sequence_parallel: bool = False, uneven: bool = False
    ) -> VocabParallelEmbedding:
        """Keep this rank's rows of `embedding`, an unsharded table that is the same on every rank.

        Raises ValueError if tp does not divide the number of rows, unless `uneven`.
        """
        if not uneven:
            require_divides("tp", comm.size, "num_embeddings", embedding.weight.shape[0])
        place_whole(embedding)
        weight = shard_parameter(embedding.weight, 0, comm.rank, comm.size)
        return cls(weight, embedding.weight.shape[0], comm, sequence_parallel, embedding.padding_idx)

    def forward(self, tokens: Tensor) -> Tensor:
        check_vocabulary("tokens", tokens, self.vocab_size)
        local, not_local = _local_tokens(tokens, self.first_token, self.weight.shape[0])
        y = F.embedding(local, self.weight, self._padding_row).masked_fill(not_local[..., None], 0.0)
        if self.sequence_parallel:
            return reduce_scatter_tokens(self.comm, y)
        return autograd.all_reduce(self.comm, y)


class VocabParallelTiedHead(TiedHead):
    """A tied head with this rank's rows of the embedding: x [B, T, D] (or [B, T/tp, D]) -> logits [B, T, V/tp]."""

    def __init__(self, comm: Comm, sequence_parallel: bool = False):
        super().__init__()
        self.comm, self.sequence_parallel = comm, sequence_parallel

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        (logits,) = column_parallel(
            self.comm, x, [ShardedWeight(weight, self.deferred)], self.sequence_parallel
        )
        return logits


class VocabParallelOutput:
    """The model's output from the head's logits [B, T, V/tp]: the gathered logits, or with targets the sum of losses."""

    def __init__(self, vocab_size: int, comm: Comm):
        self.sizes, self.comm = chunk_sizes(vocab_size, comm.size), comm

    def __call__(self, logits: Tensor, targets: Tensor | None) -> Tensor:
        if targets is None:
            return autograd.gather(self.comm, logits, dim=-1, sizes=self.sizes)
        return vocab_parallel_cross_entropy(
            self.comm, logits, targets, reduction="sum", vocab_size=sum(self.sizes)
        )


def vocab_parallel_cross_entropy(
    comm: Comm,
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> Tensor:
    """Return the cross-entropy of logits whose vocabulary is split over `comm`, on every rank, without gathering them.

    logits      [..., V/tp]   this rank's columns, split as torch.chunk splits; give vocab_size V if tp does not divide it
    targets     [...]         int64, the same on every rank; targets equal to ignore_index are not counted
    reduction   "mean" over counted targets, "sum", or "none": [...], 0 where ignored

    loss       = log(sum_v e^z_v) - (1-s) z_target - s mean_v z_v        with s = label_smoothing
    backward     dz_v = (softmax_v - (1-s)[v = target] - s/V) dloss      local

    For N targets, ring all-reduces send 2(tp-1)/tp * N numbers for the maximum, and 2(tp-1)/tp * 2N for the sum of
    exponentials and the target's logit (3N with smoothing, which adds the sum of the logits). All are float32 or wider.
    Gathering the logits would send (tp-1)/tp * N*V. Saves for the backward the logits and a few numbers per target.
    Raises ValueError if a target is neither in the vocabulary nor ignore_index, or for an unknown reduction.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown; use {one_of(('mean', 'sum', 'none'))}")
    vocab_size = comm.size * logits.shape[-1] if vocab_size is None else vocab_size
    check_vocabulary("targets", targets, vocab_size, ignore_index)
    first = vocab_bounds(vocab_size, comm.size)[comm.rank]
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2), comm, targets.flatten(), first, vocab_size, ignore_index, label_smoothing
    )
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        comm: Comm,
        targets: Tensor,
        first: int,
        vocab_size: int,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        local, not_local = _local_tokens(targets, first, logits.shape[1])
        max_logit, log_sum, target_logit, mean_logit = _statistics(
            comm, logits, local, not_local, smoothing, vocab_size
        )
        counted = targets != ignore_index
        ctx.save_for_backward(logits, max_logit, log_sum, local, not_local, counted)
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        return torch.where(counted, log_sum - (1 - smoothing) * target_logit - smoothing * mean_logit, 0.0)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        autograd.refuse_second_derivatives("vocab_parallel_cross_entropy")
        logits, max_logit, log_sum, local, not_local, counted = ctx.saved_tensors
        dloss = torch.where(counted, dloss, 0.0)
        at_target = (ctx.smoothing - 1) * (~not_local).to(log_sum.dtype)
        dz = torch.empty_like(logits)
        for rows in _row_blocks(logits):
            # Round to 16 bits only at the end: if a p near 1 were rounded first, p - 1 would have no correct digit.
            block = (logits[rows] - max_logit[rows, None]).sub_(log_sum[rows, None]).exp_()
            if ctx.smoothing:
                block -= ctx.smoothing / ctx.vocab_size
            block.scatter_add_(1, local[rows, None], at_target[rows, None])
            dz[rows] = block.mul_(dloss[rows, None])
        return dz, *(None,) * 6


def _statistics(
    comm: Comm, logits: Tensor, local: Tensor, not_local: Tensor, smoothing: float, vocab_size: int
) -> tuple[Tensor, ...]:
    """Return four numbers per row: the largest logit over the whole vocabulary and, relative to it, the log-sum-exp, the
    target's logit and the mean logit. Relative values keep the digits of a small loss. The mean needs smoothing > 0."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    max_logit = comm.all_reduce_(logits.amax(1).to(wide), op="max")
    sums = logits.new_empty((3 if smoothing else 2, len(logits)), dtype=wide)
    for rows in _row_blocks(logits):
        shifted = logits[rows] - max_logit[rows, None]
        if smoothing:
            sums[2, rows] = shifted.sum(1)
        sums[0, rows] = shifted.exp_().sum(1)
    sums[1] = (logits.gather(1, local[:, None]).squeeze(1) - max_logit).masked_fill_(not_local, 0.0)
    comm.all_reduce_(sums)
    return max_logit, sums[0].log(), sums[1], sums[-1] / vocab_size


def _row_blocks(logits: Tensor) -> list[slice]:
    step = max(1, BLOCK_ELEMS // max(1, logits.shape[1]))
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def _local_tokens(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return each token's row in this rank's shard, 0 if another rank has it, and a mask that is True for those tokens."""
    local = tokens - first
    not_local = (local < 0) | (local >= count)
    return local.masked_fill(not_local, 0), not_local


def vocab_bounds(vocab_size: int, tp: int) -> list[int]:
    """Return the first token of each rank's shard of the vocabulary, and the end of the last shard."""
    return bounds(chunk_sizes(vocab_size, tp))
