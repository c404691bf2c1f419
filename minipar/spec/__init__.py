"""Executable specifications: one set of checks for the library, for minipar.simple and for a learner's implementation.

    from minipar.spec import check
    from minipar.simple.collectives import all_reduce

    print(check("all_reduce", all_reduce))  # minipar spec all_reduce minipar.simple.collectives:all_reduce

A specification is a list of stages, ordered so that the first failure is easy to explain: the implementation runs; it is
right in one small case, then in many generated cases; it sends the right bytes, uses the right memory, or does things in
the right order; and it is right for other dtypes, sizes, strides, values and ranks. The report names the first stage that
fails, the tensor that is wrong and its rank, and the rank whose part is missing or was added twice. In reading order:

specification.py       Specification, Stage and Report; running a check on worlds of several sizes
from_file.py           an implementation in a file, loaded on each rank, and its time limit
own_comm.py            an implementation on a small Comm of its own instead of the library's
convention.py          what an implementation may state, to be judged by it
counted.py             bytes and messages, of a Comm and of torch.distributed
witness.py             what an implementation may not write to, seen at each call of any implementation
question.py            functions on ranks as data, and how they are asked
words.py               a wrong tensor or a wrong byte count, described in a sentence
varied.py              kinds of input other than small float64 tensors: other dtypes, sizes, strides, values
collectives.py         reduce-scatter, all-gather, all-reduce, broadcast, all-to-all
algorithms.py          a shift; all-reduces in place, by halving and doubling, and in two levels
conjugates.py          differentiable collectives and their adjoints
training.py            models trained on ranks beside one process, for data_parallel.py, zero.py and fsdp.py
memory.py              bytes of live tensors, for zero.py and fsdp.py
data_parallel.py       averaged gradients; DDP's buckets and overlap
zero.py                ZeRO-1, ZeRO-2
fsdp.py                FSDP (ZeRO-3)
tensor_parallel.py     a sharded MLP, sharded attention, and a sequence-parallel block
vocab.py               the embedding and the cross-entropy with a sharded vocabulary
pipeline.py            one step of a pipeline
schedules.py           pipeline schedules as data
moe.py                 dispatching rows to their experts and back; Switch
context.py             attention over a sharded sequence, and the two halves of ring attention
mesh.py                the groups of a mesh
whole_batch.py         the loss over all ranks' tokens, the norm of a sharded gradient
reshard.py             reading a block of a matrix that was saved in other blocks
kv_cache.py            attention with a cache of keys and values
paged.py               blocks of the cache, and attention through block tables
speculation.py         accepting or rejecting guessed tokens, checked by the exact distribution of the output
batching.py            a step of a scheduler
all_specifications.py  SPECIFICATIONS: every specification, by name; check, the door to them
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
