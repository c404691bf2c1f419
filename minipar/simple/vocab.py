"""The two ends of a language model with the vocabulary cut: rank r has tokens r V/tp ... of embedding and logits.

    embedding       look up the tokens I have, zero for the others, and sum over ranks      2(tp-1)/tp * B*T*D elements
    cross-entropy   three numbers per token cross: the maximum, the sum of exponentials, the target's logit

The logits [B, T, V] are the largest tensor of a step; they are never whole on any rank.

The library's: minipar.VocabParallelEmbedding and minipar.vocab_parallel_cross_entropy, plus vocabularies that tp does not
divide, ignored targets, label smoothing, 16-bit logits, less memory.
Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

import torch
import torch.nn.functional as F
from torch.autograd import Function

from minipar.simple.autograd import all_reduce


def embedding(comm, tokens, w):
    """tokens [B, T], the same on every rank; w [V/tp, D]  ->  [B, T, D] on every rank"""
    mine, elsewhere = _mine(comm, tokens, len(w))
    return all_reduce(comm, F.embedding(mine, w).masked_fill(elsewhere[..., None], 0.0))


def cross_entropy(comm, logits, targets):
    """The mean over targets of logsumexp(z) - z[target].   logits [N, V/tp]   targets [N], the same on every rank"""
    return _CrossEntropy.apply(logits, comm, targets)


def _mine(comm, tokens, size):
    """Tokens as rows of this rank's part, 0 where another rank has them, and which these are."""
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
        z = logits - comm.all_reduce(logits.amax(1), "max")[:, None]  # so that exp cannot overflow
        at_target = z.gather(1, mine[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        sum_exp, at_target = comm.all_reduce(torch.stack([z.exp().sum(1), at_target]))
        ctx.save_for_backward(z, sum_exp, mine, elsewhere)
        return (sum_exp.log() - at_target).mean()

    @staticmethod
    def backward(ctx, dloss):
        z, sum_exp, mine, elsewhere = ctx.saved_tensors
        dz = z.exp() / sum_exp[:, None]  # the softmax, less 1 at the target
        dz[torch.arange(len(dz)), mine] -= (~elsewhere).to(dz.dtype)
        return dz * dloss / len(dz), None, None
