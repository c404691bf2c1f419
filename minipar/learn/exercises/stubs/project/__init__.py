"""The files of `minipar exercise project` that are not stubs of exercises.

comm.py             a group of ranks, and its messages
collectives.py      reduce-scatter, all-gather and all-reduce
ddp.py              averaged gradients, and DDP
tensor_parallel.py  a column- and a row-parallel matrix, with exchangeable operators before and after
train.py            trains with all of them; it runs from the first step on
"""
