"""Puzzles: write the program of one rank, run it on a simulated network, read the verdict. No torch, no numpy.

    minipar puzzle list                    all puzzles
    minipar puzzle show ring               the task, and the stub to begin with
    minipar puzzle start ring              writes the stub to ring.py
    minipar puzzle check ring              runs the program on a simulated network, and says what is wrong

In reading order:

values.py            tensors without numbers, which know whose parts were added into them
network.py           ranks as coroutines over a simulated network, with a clock
collectives.py       what later puzzles give ready-made: all_reduce, reduce_scatter, all_gather
puzzle.py            what a puzzle is: texts, inputs, the result that is wanted, limits
running.py           a learner's source on every rank, stopped where it never ends
verdicts.py          what is wrong, in one sentence, and bytes, seconds and memory beside the best known
naive_all_reduce.py  everybody sends everything to everybody
ring_all_reduce.py   2 (p-1)/p of the bytes
two_halves.py        reduce-scatter and all-gather
overlap.py           gradients averaged while the backward runs
zero2.py             a shard of every gradient
fsdp.py              gather and free
one_f_one_b.py       a pipeline within a limit of memory
split_mlp.py         columns, then rows
ring_attention.py    keys and values travel, queries stay
whole_mesh.py        pp, dp and tp together
registry.py          the ten puzzles, by name
command.py           the command `minipar puzzle`
"""
