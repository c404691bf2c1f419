"""Executable specifications: the same checks for the library, for minipar.simple, and for a learner's own implementation.

    from minipar.spec import SPECIFICATIONS
    from minipar.simple.collectives import all_reduce

    print(SPECIFICATIONS["all_reduce"].check(all_reduce))

A specification is a list of stages, in the order in which mistakes are easiest to explain: the implementation runs; it is
right in one small case, then in many generated cases; then come the bytes sent, the memory, or the order of events. The
report of the first stage that fails says which tensor is wrong, on which rank, and which rank's part is missing or was
added twice. In reading order:

specification.py       Specification, Stage and Report; running a check on worlds of several sizes
from_file.py           an implementation in a file, loaded on each rank, and its deadline
words.py               a wrong tensor or a wrong byte count, described in a sentence
collectives.py         reduce-scatter, all-gather, all-reduce, broadcast, all-to-all
algorithms.py          a shift; all-reduces in place, by halving and doubling, and over nodes
conjugates.py          operators between ranks and their adjoints
training.py            small models trained on ranks and by one process, for data_parallel.py, zero.py and fsdp.py
memory.py              bytes of the tensors that are alive, for zero.py and fsdp.py
data_parallel.py       averaged gradients; DDP's buckets and overlap
zero.py                ZeRO-1, ZeRO-2
fsdp.py                FSDP (ZeRO-3)
tensor_parallel.py     a sharded MLP, sharded attention, and a sequence-parallel block
vocab.py               the embedding and the cross-entropy with a sharded vocabulary
pipeline.py            one step of a pipeline
schedules.py           pipeline schedules as data
moe.py                 rows to their experts and back; Switch
context.py             attention over a sharded sequence, and the two halves of ring attention
mesh.py                the groups of a mesh
whole_batch.py         the loss over all ranks' tokens, the gradient's norm over all parts
reshard.py             a matrix saved in parts, read as other parts
all_specifications.py  SPECIFICATIONS: every specification, by name
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
