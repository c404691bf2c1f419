"""Distributed training from send and receive up: each idea once, in one short file, with exact numbers, but not fast.

It needs only torch, and can be copied anywhere: after `cp -r minipar/simple somewhere`, run `python -m simple.train` there.
README.md lays the files out as a three-hour course. The functions take a Comm, which is a rank's membership in a group:

    comm.rank, comm.size                   this rank's number in the group, and how many ranks the group has
    comm.send, comm.recv, comm.exchange    point-to-point messages
    comm.all_reduce, comm.all_gather, ...  collectives, called by all ranks of the group in the same order; they sum, or,
                                           with "mean", divide the sum by comm.size; with async_op=True they return at
                                           once, and .wait() returns the result
    comm.subgroup(ranks, name)             the Comm of some of these ranks

The Comm may be the one of comm.py or the library's, minipar.Comm: both have these methods. `run(fn, 4)` of launch.py starts
four processes; each calls fn(world), where `world` is its Comm of all four ranks.

In reading order:

collectives.py        ring reduce-scatter, all-gather and all-reduce; tree broadcast; all-to-all
comm.py               a group of ranks: messages by isend and irecv, and the collectives as methods
launch.py             start ranks, or take torchrun's; end all when one fails
ddp.py                gradients averaged after the backward; then in buckets, during it
global_loss.py        the loss of a batch whose ranks count different numbers of targets
zero.py               the optimizer's state sharded over ranks (ZeRO-1), then the gradients too (ZeRO-2)
fsdp.py               the parameters sharded too: each unit is all-gathered to run, then freed (ZeRO-3)
autograd.py           collectives with a backward: Megatron's f and g, and their sequence-parallel pair
tensor_parallel.py    column- and row-parallel matrices, and the MLP and the attention built from them
vocab.py              the embedding and the cross-entropy with a sharded vocabulary
sequence_parallel.py  tensor parallelism with the tokens sharded outside the matrices
pipeline.py           GPipe and 1F1B as loops with send and receive
dispatch.py           rows sent to the ranks of their experts, and back, by all-to-all
moe.py                Switch: capacity, balance loss and z-loss
ring_attention.py     attention over a sharded sequence: keys and values are sent around a ring
ulysses.py            attention over a sharded sequence: all-to-all to all tokens of some heads, and back
mesh.py               the grid of ranks, and each rank's group along each axis
transformer.py        the model that train.py trains, and a rank's part of it
train.py              all of it: dp x tp x pp; flags add cp, ep, ZeRO-1 and sequence parallelism
grad_norm.py          the norm of a gradient whose parts are on many ranks
reshard.py            a matrix saved as the parts of one mesh, read as the parts of another
sign_compression.py   a mean over ranks at one bit per element, with error feedback
power_sgd.py          a mean over ranks as the product of two thin matrices
generate.py           text, one token at a time, with a key/value cache
paged.py              the cache in blocks, with a block table per sequence; new tokens of many sequences in one pass
continuous.py         continuous batching: sequences enter and leave the batch at every step
speculative.py        guess several tokens, verify them in one pass: accept or resample

Where a file checks for a case that it does not handle, its ValueError names the library's version, which does.
"""
