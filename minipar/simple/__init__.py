"""The ground floor: every idea once, in its smallest honest form. Real ranks, exact numbers, no speed, no rare callers.

Each file imports torch, talks through a Comm, and reads at most one other file of this folder. In reading order:

collectives.py        ring reduce-scatter, all-gather, all-reduce; tree broadcast; all-to-all
autograd.py           f and g, and their sequence-parallel pair
ddp.py                gradients averaged: after the backward, then in buckets while it runs
zero.py               the optimizer's state cut over ranks (ZeRO-1), then the gradients too (ZeRO-2)
fsdp.py               parameters cut too: units gathered when they run, and freed
tensor_parallel.py    column and row, the MLP and the attention made of them
vocab.py              the embedding and the loss with the vocabulary cut
sequence_parallel.py  between the cut matrices each rank has its own tokens
pipeline.py           GPipe and 1F1B as loops with send and receive
moe.py                Switch: capacity, balance and z-loss, dispatch and combine by all-to-all
ring_attention.py     keys and values travel around a ring
ulysses.py            all tokens of some heads for some tokens of all heads
mesh.py               which ranks talk along which axis
train.py              dp x tp x pp on real text in one file: python -m minipar.simple.train

What a file refuses, the library does; the ValueError says where.
"""
