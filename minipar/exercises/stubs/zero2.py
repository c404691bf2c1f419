"""ZeRO-2: the gradients in parts, too. A gradient is cut as soon as the backward has computed it.

Held to: as ZeRO-1, and between backward() and step() a p-th part of the gradients held; two backwards before a step
add up.
"""


class Zero2:
    """Runs optimizer_cls(parts, **options). All ranks start with rank 0's parameters, which stay whole."""

    def __init__(self, params, optimizer_cls, comm, **options):
        raise NotImplementedError

    def step(self):
        """Update all parameters, on every rank."""
        raise NotImplementedError

    def zero_grad(self):
        """Forget the gradients."""
        raise NotImplementedError
