"""Cross-entropy with a sharded vocabulary: the mean of logsumexp(z) - z[target]; no rank has all columns of z.

Checked: the loss and the gradient of one process, also for logits of 1e4; three numbers per target all-reduced forward,
none backward. For logits in bfloat16, compute in float32; return the gradient in bfloat16, the loss in bfloat16 or float32.
"""


def cross_entropy(comm, logits, targets):
    """logits [N, V/p], rank r's from entry r V/p on   targets [N], the same on every rank   ->   loss []"""
    raise NotImplementedError
