"""The loss of a batch split over ranks: the sum over all counted tokens, divided by their number on all ranks.

    loss = 1/n * sum over ranks and counted tokens of -log softmax(logits)[target]        n = sum over ranks of n_r

The ranks' mean losses must not be averaged: if a rank counts fewer tokens, each of its tokens would weigh more. Each rank
returns its own summand of the loss; the loss is the sum of the summands, and so are the gradients. Hence data parallelism
must sum gradients here, not average them. One number is sent, the count.

In the library: minipar.train, where every rank knows the count of a step from its seed, and nothing is sent.
"""

import torch.nn.functional as F


def global_loss(comm, logits, targets):
    """This rank's summand of the loss.   logits [N, V], targets [N], of this rank; a target of -100 does not count"""
    counted = comm.all_reduce((targets != -100).sum())
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / counted
