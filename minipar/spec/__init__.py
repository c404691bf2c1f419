"""What makes an implementation right, said once: run over the library, the ground floor, and a learner's own file.

    from minipar.spec import SPECIFICATIONS
    from minipar.simple.collectives import all_reduce

    print(SPECIFICATIONS["all_reduce"].check(all_reduce))

A specification is a list of stages, in the order in which a mistake is best met: it runs; it is right on one small case,
explained; on drawn cases; the bytes; the memory, or the order of events. The first stage that is not met says in words
what is wrong: which tensor, on which rank, whose part is missing or came twice.

specification.py      Specification, its stages, the report
words.py              differences in words
collectives.py        reduce-scatter, all-gather, all-reduce, broadcast, all-to-all
conjugates.py         operators and their adjoints
training.py           a small model trained on ranks and by one process: what the next three share
data_parallel.py      averaged gradients; DDP: buckets and overlap
zero.py               ZeRO-1, ZeRO-2
fsdp.py               ZeRO-3
tensor_parallel.py    an MLP, attention, and a block of sequence parallelism, cut
vocab.py              the embedding and the loss with the vocabulary cut
pipeline.py           a step of a pipeline
schedules.py          orders as data
moe.py                Switch
context.py            attention over a split sequence
mesh.py               groups
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
