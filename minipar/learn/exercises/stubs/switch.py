"""Switch: each token goes to its most probable expert, if that has capacity left.

    p(t) = softmax(router x(t))      e = argmax p(t)      y(t) = p_e(t) * expert_e(x(t)), or 0 where dropped
    capacity         ceil(T/E * capacity_factor) tokens of each sequence; an expert takes the first tokens that choose it
    balance loss     E * sum over e of f_e P_e, the mean over sequences
                     f_e: the fraction of a sequence's tokens whose first expert is e, P_e: the mean of p_e
    z-loss           mean of logsumexp(logits)^2

Checked: the results of one process, for any number of ranks and of sequences on each.
"""


def switch(comm, x, router, gate, up, down, capacity_factor):
    """Return (y, balance_loss, z_loss, dropped): losses are means over this rank's sequences; dropped: its dropped tokens.

    x, y        [B, T, D]      this rank's sequences
    router      [E, D]         the same on every rank
    gate, up    [E/p, F, D]    down [E/p, D, F]    this rank's experts, from number r E/p on
    """
    raise NotImplementedError
