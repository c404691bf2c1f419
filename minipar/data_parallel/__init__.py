"""Data parallelism: every rank has the model, or a shard of it, and a part of the batch. In reading order:

arguments.py               checks of the arguments that DDP, ZeRO and FSDP have in common
flat_layout.py             the places of parameters in a flat buffer, and the chunks into which ranks cut it
reductions.py              the all-reduce or reduce-scatter of a flat buffer, and the interface of what may replace it
buckets.py                 parameters grouped into flat buffers, roughly in the order in which their gradients are ready
partial_gradients.py       `.grad` of a parameter under ZeRO, once reduced: torch's gradient clipping raises on it
backward_end.py            a callback at the end of a backward
gradient_reducer.py        the reduction of buckets during the backward, common to DDP and ZeRO
buffers.py                 running means and other buffers: copied from rank 0 before each forward
ddp.py                     DDP: every rank has a replica, and gradients are all-reduced
sharded_bucket.py          a bucket of which each rank owns a chunk
memory.py                  where shards and states are kept between updates: on the device, in CPU memory or on disk
chunk_optimizer.py         the optimizer of one chunk
unused_parameters.py       finding the parameters that at least one rank used
optimizer_state.py         saving and loading a sharded optimizer's state dict: gathered, or this rank's part
zero.py                    ZeRO-1 and ZeRO-2: the optimizer's state is sharded, then the gradients too
fsdp_guards.py             what FSDP refuses: a rank's part of a state, freed parameters, compiled units, optimizers of rows
flat_parameters.py         a unit's parameters as one flat buffer, unsharded and resharded
flat_gradients.py          a unit's gradients, reduced to shards
fsdp_unit.py               FSDP's units: their order, and when each is reduced
fsdp_wrapping.py           which modules are units, which parameters each has, and how these become shards
fsdp_full_state.py         FSDP's parameters unsharded all at once: the full state dict, out and in, and a context
fsdp.py                    ZeRO-3, or FSDP: the parameters are sharded too, and unsharded only while their unit runs
optimizer_interface.py     one optimizer interface for every ZeRO stage
loss_scaler.py             dynamic loss scaling, for gradients in fp16
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
