"""Vocabulary parallelism: rank r has V/tp entries of the vocabulary, from r*V/tp on, in the embedding and in the logits.

    embedding       a rank looks up the tokens that it has rows for, else 0;        all-reduce of B*T*D elements
    cross-entropy   the maximum, the sum of exponentials, the target's logit;       all-reduces of 3 elements per token

An all-reduce of n elements sends 2 (tp-1)/tp * n per rank. The logits [B, T, V] are often the largest tensor of a step; no
rank ever has all of them. The head that computes them is a column-parallel matrix, so its input needs `copy`.

In the library: minipar.VocabParallelEmbedding and minipar.vocab_parallel_cross_entropy, which add vocabularies that tp does
not divide, ignored targets, label smoothing, less memory.
Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

import torch
import torch.nn.functional as F
from torch.autograd import Function

from .autograd import all_reduce


def embedding(comm, tokens, w, leave=all_reduce):
    """tokens [B, T], the same on every rank; w [V/tp, D], this rank's rows  ->  [B, T, D], the same on every rank"""
    local_ids, is_remote = to_local(comm, tokens, len(w))
    return leave(comm, F.embedding(local_ids, w).masked_fill(is_remote[..., None], 0.0))


def cross_entropy(comm, logits, targets):
    """The mean over tokens of logsumexp(z) - z[target].   logits z [N, V/tp]   targets [N], the same on every rank

    Computed in float32, or wider where the logits are; their gradient has their dtype.
    """
    return CrossEntropy.apply(logits, comm, targets)


def to_local(comm, ids, num_rows):
    """Return the ids as row numbers of this rank, 0 for another rank's ids, and a mask of those."""
    if ids.numel() and not 0 <= ids.min() <= ids.max() < num_rows * comm.size:
        raise ValueError(
            f"tokens outside 0 ... {num_rows * comm.size - 1}; minipar.vocab_parallel_cross_entropy can ignore -100"
        )
    local_ids = ids - comm.rank * num_rows
    is_remote = (local_ids < 0) | (local_ids >= num_rows)
    return local_ids.masked_fill(is_remote, 0), is_remote


class CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, comm, targets):
        local_ids, is_remote = to_local(comm, targets, logits.shape[1])
        # At least float32: in bfloat16, 1 + exp(-6) rounds to 1, whose logarithm is 0.
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        z = z - comm.all_reduce(z.amax(1), "max")[:, None]  # exp cannot overflow
        at_target = z.gather(1, local_ids[:, None])[:, 0].masked_fill(is_remote, 0.0)
        sum_exp, at_target = comm.all_reduce(torch.stack([z.exp().sum(1), at_target]))
        ctx.save_for_backward(z, sum_exp, local_ids, is_remote)
        ctx.dtype = logits.dtype
        return (sum_exp.log() - at_target).mean()

    @staticmethod
    def backward(ctx, dloss):
        """dz = (softmax(z) - one-hot(target)) / N: only the rank that has a target's column subtracts its 1."""
        z, sum_exp, local_ids, is_remote = ctx.saved_tensors
        dz = z.exp() / sum_exp[:, None]
        tokens = torch.arange(len(dz), device=dz.device)
        dz[tokens, local_ids] -= (~is_remote).to(dz.dtype)
        return (dz * dloss / len(dz)).to(ctx.dtype), None, None
