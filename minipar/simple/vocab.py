"""Vocabulary parallelism: rank r has V/tp entries of the vocabulary, from r*V/tp on, in the embedding and in the logits.

    embedding       a rank looks up the tokens it has rows for, 0 for the others;   all-reduce of B*T*D elements
    cross-entropy   the maximum, the sum of exponentials, the target's logit;       all-reduces of 3 elements per token

An all-reduce of n elements sends 2 (tp-1)/tp * n per rank. The logits [B, T, V] are often the largest tensor of a step; no
rank ever has all of them. The head that computes them is a column-parallel matrix, so its input needs `copy`.

In the library: minipar.VocabParallelEmbedding and minipar.vocab_parallel_cross_entropy, which add vocabularies that tp does
not divide, ignored targets, label smoothing, 16-bit logits, less memory.
Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

import torch
import torch.nn.functional as F
from torch.autograd import Function

from minipar.simple.autograd import all_reduce


def embedding(comm, tokens, w):
    """tokens [B, T], the same on every rank; w [V/tp, D], this rank's rows  ->  [B, T, D], the same on every rank"""
    mine, elsewhere = _mine(comm, tokens, len(w))
    return all_reduce(comm, F.embedding(mine, w).masked_fill(elsewhere[..., None], 0.0))


def cross_entropy(comm, logits, targets):
    """The mean over tokens of logsumexp(z) - z[target].   logits z [N, V/tp]   targets [N], the same on every rank"""
    return _CrossEntropy.apply(logits, comm, targets)


def _mine(comm, tokens, size):
    """Return the tokens as local row numbers, 0 for another rank's tokens, and a mask of the latter."""
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < size * comm.size:
        raise ValueError(
            f"tokens outside 0 ... {size * comm.size - 1}; minipar.vocab_parallel_cross_entropy can ignore -100"
        )
    local = tokens - comm.rank * size
    elsewhere = (local < 0) | (local >= size)
    return local.masked_fill(elsewhere, 0), elsewhere


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, comm, targets):
        mine, elsewhere = _mine(comm, targets, logits.shape[1])
        z = logits - comm.all_reduce(logits.amax(1), "max")[:, None]  # exp cannot overflow
        at_target = z.gather(1, mine[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        sum_exp, at_target = comm.all_reduce(torch.stack([z.exp().sum(1), at_target]))
        ctx.save_for_backward(z, sum_exp, mine, elsewhere)
        return (sum_exp.log() - at_target).mean()

    @staticmethod
    def backward(ctx, dloss):
        z, sum_exp, mine, elsewhere = ctx.saved_tensors
        dz = z.exp() / sum_exp[:, None]  # softmax, then minus 1 at the target, on the rank that has it
        dz[torch.arange(len(dz)), mine] -= (~elsewhere).to(dz.dtype)
        return dz * dloss / len(dz), None, None
