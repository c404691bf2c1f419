"""Puzzles: write the program of one rank, run it on a simulated network, and read the verdict. Needs no torch or numpy.

    minipar puzzle list                    all puzzles
    minipar puzzle show ring               the task, and the stub to begin with
    minipar puzzle start ring              writes the stub to ring.py
    minipar puzzle check ring              runs the program on a simulated network, and says what is wrong

In reading order:

values.py            tensors without values, which record the ranks whose parts were added into them
network.py           ranks as coroutines on a simulated network, with a clock
collectives.py       the collectives that later puzzles provide: all_reduce, reduce_scatter, all_gather
puzzle.py            the description of a puzzle: texts, inputs, expected results, limits
running.py           runs a learner's source on every rank, and stops endless loops
verdicts.py          says in one sentence what is wrong, and compares bytes, time and memory with the best known

The puzzles:

naive_all_reduce.py  an all-reduce in which every rank sends its gradient to every other rank
ring_all_reduce.py   an all-reduce in a ring, which sends 2 (p-1)/p of the bytes
two_halves.py        reduce-scatter and all-gather
overlap.py           gradients averaged while the backward runs
zero2.py             ZeRO-2: only a shard of every gradient is kept
fsdp.py              FSDP: weights are gathered, used and freed
one_f_one_b.py       1F1B: a pipeline with limited memory
split_mlp.py         tensor parallelism: the first weight split by columns, the second by rows
ring_attention.py    ring attention: keys and values travel, queries stay
whole_mesh.py        pp, dp and tp together
registry.py          the ten puzzles, by name
command.py           the command `minipar puzzle`
"""
