"""Data parallelism: every rank has the model and a part of the batch. In reading order:

buckets.py  parameters grouped into flat buffers, in the order in which their gradients become ready
ddp.py      the same gradients on every rank, reduced while the backward is still running
"""

from minipar.data_parallel.ddp import DDP

__all__ = ["DDP"]
