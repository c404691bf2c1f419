"""The loss of a batch whose tokens are split over ranks: a sum over tokens, divided by their number on all ranks.

    loss = 1/n * sum over ranks and counted tokens of -log softmax(logits)[target]        n = sum over ranks of n_r

Each rank returns its own term; the loss is the sum of the terms. A target of -100 does not count. A rank may have no
counted target.

Checked: the loss and the gradient of one process; one number sent.
"""


def global_loss(comm, logits, targets):
    """logits [N_r, V] and targets [N_r], of this rank -> its term, [] (one element)"""
    raise NotImplementedError
