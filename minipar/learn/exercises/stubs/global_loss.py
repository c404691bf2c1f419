"""The loss of a batch whose tokens are split over ranks: a sum over tokens, divided by their number on all ranks.

    loss = 1/n * sum over ranks and counted tokens of -log softmax(logits)[target]        n = sum over ranks of n_r

Each rank returns its own summand: the sum over its tokens, divided by n. The loss is the sum of the ranks' summands. A
target of -100 does not count. A rank may have no target that counts.

Checked: the loss and the gradient of one process; what is sent is one all-reduce of one number.
"""


def global_loss(comm, logits, targets):
    """logits [N_r, V] and targets [N_r], of this rank -> its summand, [] (one element)"""
    raise NotImplementedError
