"""FSDP (ZeRO-3): each rank keeps 1/p of every parameter; a unit is unsharded only while it runs.

    before a unit's forward     gather its parameters       (p-1)/p of its elements sent
    after it                    free them
    before its backward         gather again                (p-1)/p
    after it                    reduce-scatter gradients    (p-1)/p, then free both

Checked: the outputs and gradients of one process; 3(p-1)/p of the parameters' bytes sent; with Adam, 4/p times the
parameters' bytes held between steps; at most about two units unsharded at once during a step.
"""

from torch import nn


class FSDP(nn.Module):
    """Makes each submodule of class `unit_class` a unit; together the units have all parameters.

    `__init__` copies rank 0's parameters to all ranks (comm.broadcast) before it cuts them. parameters() yields this rank's
    parts, whose .grad the backward fills.
    """

    def __init__(self, module, comm, unit_class):
        super().__init__()
        raise NotImplementedError

    def forward(self, x):
        raise NotImplementedError
