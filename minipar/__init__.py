"""minipar: distributed training, every piece written by hand and proved equal to one process.

One model, one seed, one batch: every mesh gives the same numbers. In reading order:

errors, chunks, trace, live_bytes   how a request is refused; how a length is cut; what a rank did and when
schedules                           pipelines as data; imports no torch
comm                                Comm: ranks, messages, collectives
mesh                                ranks and axes; the part of a tensor that a local tensor holds
runtime                             ranks as processes, here or under torchrun
model                               the Transformer, written for one process: the oracle of every test
data_parallel                       DDP, ZeRO-1, ZeRO-2, FSDP
tensor_parallel                     matrices cut over ranks, and sequences between them
pipeline                            one executor for every schedule
expert                              mixtures of experts spread over ranks
context                             attention over tokens that other ranks hold
train, cli                          the main job: any mesh, and the proof

The names a program needs most are here: `minipar.run`, `minipar.Mesh`, `minipar.DDP` and so on. Each is imported when it
is asked for, so `import minipar` imports no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
