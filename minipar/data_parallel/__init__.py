"""Data parallelism: every rank has the model, or its shard of it, and a part of the batch. In reading order:

arguments.py               arguments common to DDP, ZeRO and FSDP, checked
buckets.py                 parameters grouped into flat buffers, roughly in the order in which their gradients are ready
partial_gradients.py       what `.grad` is where a rank has only a part: torch's clipping of it raises
gradient_reducer.py        the reduction of buckets during the backward, common to DDP and ZeRO
buffers.py                 running means and other buffers: rank 0's, before each forward
ddp.py                     DDP: every rank has a replica, and gradients are all-reduced
sharded_bucket.py          a bucket of which each rank owns a chunk
scratch_file.py            a file without a name, for tensors that are not needed in memory
offload.py                 memory for shards and optimizer state: the device's, the host's, or a file, read ahead
chunk_optimizer.py         the optimizer of one chunk
elementwise_optimizers.py  the optimizers that may update a shard of a parameter
tensor_lists.py            what optimizers do to lists of tensors, as one kernel each
lamb.py                    one that needs norms of whole parameters, and all-reduces them
muon.py                    Muon, which needs whole matrices
unused_parameters.py       the parameters that any rank used
optimizer_state.py         a sharded optimizer's state in torch's form: gathered, or this rank's part; out and in
zero.py                    ZeRO-1 and ZeRO-2: the optimizer's state is sharded, then the gradients too
whole_parameters.py        the same, but each parameter belongs to one rank as a whole, for such optimizers
freed_parameter.py         the error on using a parameter whose unit is resharded
flat_parameters.py         a unit's parameters as one flat buffer, unsharded and resharded
flat_gradients.py          their gradients, reduced to shards
fsdp_unit.py               FSDP's units: which module is one, which parameters it has, and their order
fsdp_full_state.py         FSDP's shards made from full parameters, and gathered again
fsdp.py                    ZeRO-3, or FSDP: the parameters are sharded too, and unsharded only while their unit runs
optimizer_interface.py     one interface to the optimizer, for every stage
offloaded_optimizer.py     an optimizer of FSDP's shards, with its states in that memory
loss_scaler.py             dynamic loss scaling, for gradients in fp16
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
