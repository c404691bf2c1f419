"""ZeRO-2: gradients are sharded too. Each gradient is reduced to shards as soon as the backward has computed it.

Checked: as for ZeRO-1; between backward() and step(), each rank holds 1/p of the gradients; two backwards before a step
accumulate gradients.
"""


class Zero2:
    """Runs optimizer_cls(parts, **options). `__init__` copies rank 0's parameters to all ranks (comm.broadcast).

    The parameters themselves stay whole on every rank: gradients and the optimizer's state are sharded.
    """

    def __init__(self, params, optimizer_cls, comm, **options):
        raise NotImplementedError

    def step(self):
        """Update all parameters, on every rank."""
        raise NotImplementedError

    def zero_grad(self):
        """Forget the gradients."""
        raise NotImplementedError
