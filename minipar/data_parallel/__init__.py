"""Data parallelism: every rank has the model and a part of the batch. In reading order:

buckets.py      parameters grouped into flat buffers, in the order in which their gradients become ready
ddp.py          the same gradients on every rank, reduced while the backward is still running
shard.py        a bucket of which each rank owns a chunk
update.py       the optimizer of one chunk
zero.py         ZeRO-1 and ZeRO-2: the optimizer's state is cut, then the gradients
state.py        a cut optimizer's state in and out, whole
per_element.py  which optimizers may be cut
lamb.py         one that may not, unless its ranks talk
fsdp.py         ZeRO-3, or FSDP: the parameters are cut too, and whole only while their unit runs
backward.py     its half that autograd calls
unit.py         which modules are units, and which unit has which parameter
flat.py         a unit's parameters as one flat buffer, gathered and freed
whole.py        from whole parameters to shards and back
guard.py        a freed parameter, which says so when it is used
usage.py        which parameters did any rank use
offload.py      states in the host's memory, or on disk
precision.py    the scale of a loss whose gradients are fp16
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
