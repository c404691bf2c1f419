"""Data parallelism: every rank has the model and a part of the batch. In reading order:

buckets.py      parameters grouped into flat buffers, in the order in which their gradients become ready
ddp.py          the same gradients on every rank, reduced while the backward is still running
shard.py        a bucket of which each rank owns a chunk
update.py       the optimizer of one chunk
zero.py         ZeRO-1 and ZeRO-2: the optimizer's state is cut, then the gradients
state.py        a cut optimizer's state in and out, whole
per_element.py  which optimizers may be cut
lamb.py         one that may not, unless its ranks talk
usage.py        which parameters did any rank use
offload.py      states in the host's memory, or on disk
"""

from minipar.data_parallel.ddp import DDP
from minipar.data_parallel.lamb import Lamb
from minipar.data_parallel.zero import ZeroOptimizer

__all__ = ["DDP", "Lamb", "ZeroOptimizer"]
