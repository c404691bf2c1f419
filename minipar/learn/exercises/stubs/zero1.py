"""ZeRO-1: every rank keeps the optimizer state of 1/p of every parameter.

    step    this rank's part of the gradient = 1/p * sum over ranks    (p-1)/p P elements sent, of P parameters
            update this rank's part of the parameters
            gather all parts                                           (p-1)/p P elements

Checked: all ranks begin with rank 0's parameters; the parameters of one process, with SGD and AdamW; 2(p-1)/p P elements
sent; 1/p of the state held.
"""


class Zero1:
    """Runs optimizer_cls(parts, **options). `__init__` copies rank 0's parameters to all ranks (comm.broadcast).

    The parameters themselves stay whole on every rank: only the optimizer's state is sharded.
    """

    def __init__(self, params, optimizer_cls, comm, **options):
        raise NotImplementedError

    def step(self):
        """Update all parameters, on every rank, with the mean over ranks of .grad; each rank's .grad is of its batch."""
        raise NotImplementedError

    def zero_grad(self):
        """Forget the gradients."""
        raise NotImplementedError
