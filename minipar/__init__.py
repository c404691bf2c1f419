"""minipar: distributed training, every piece written by hand and proved equal to one process.

For the same model, seed and batch, every mesh computes the same numbers. Each part imports only from those above it:

simple           every idea once, in its smallest form: begin here
support          errors, the registry of kinds and extras, options, traces
schedules        pipeline schedules as data; imports no torch
config           the settings of a run and of a model, and every rule of what is legal; imports no torch
cost             memory, traffic and time of a run by formula, and the planner; imports no torch
comm             Comm: ranks, messages, collectives; in it transport, how bytes move
mesh             ranks and axes; placements, the part of a global tensor that a rank holds
runtime          ranks as processes, in a local pool or under torchrun
model            the Transformer for one process: the reference of every test
spec             specifications that check an implementation: ours, or a learner's
data_parallel    DDP, ZeRO-1, ZeRO-2, FSDP
tensor_parallel  sharded matrices, and sequence parallelism between them
pipeline         one executor for every schedule
expert           expert parallelism for MoE layers
context          attention over a sequence split across ranks
train            training on any mesh; in it data, checkpoint, and verification against one process
inference        many requests served together, each with the same text as if served alone (up to ties of rounding)
extras           parts that few runs use, found by name: nothing above imports them
learn            exercises, puzzles, museum of bugs, quiz
visualize        pictures of runs, layouts and schedules
cli              the `minipar` command
__main__         `python -m minipar`

Twelve ideas, and where each is defined, specified, implemented and taught: `minipar ideas`, or `minipar.learn.ideas`.
Each idea's definition is one file of `minipar.simple`, and its specification, in `minipar.spec`, judges any implementation.

The names most programs need are exported here: `minipar.run`, `minipar.Mesh`, `minipar.DDP` and so on. Each is imported
on first use, so `import minipar` does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
