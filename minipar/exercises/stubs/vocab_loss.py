"""Cross-entropy with a sharded vocabulary: the mean of logsumexp(z) - z[target]; columns of z never meet.

Held to: the loss and the gradient of one process, also for logits of 1e4; three numbers per target sent forward, none
backward.
"""


def cross_entropy(comm, logits, targets):
    """logits [N, V/p], entries r V/p, ... of each token's V   targets [N], the same on every rank   ->   []"""
    raise NotImplementedError
