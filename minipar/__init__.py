"""minipar: distributed training, every piece written by hand and proved equal to one process.

For the same model, seed and batch, every mesh computes the same numbers. Each part imports from those above it alone:

errors           error messages for invalid requests; RankError for a failed rank
chunks           chunk sizes, as torch.chunk cuts
trace            spans of compute, communicate and wait time
live_bytes       live and peak tensor bytes on a CPU
staging          copies to a GPU for which the host does not wait
options          fields of a configuration with their help, and type checks
schedules        pipeline schedules as data; imports no torch
cost             memory, traffic and time of a run by formula, and the planner; imports no torch
comm             Comm: ranks, messages, collectives
mesh             ranks and axes; placements, the part of a global tensor that a rank holds
runtime          ranks as processes, in a local pool or under torchrun
simple           every idea once, in its smallest form: begin here
model            the Transformer for one process: the reference of every test
data_parallel    DDP, ZeRO-1, ZeRO-2, FSDP
tensor_parallel  sharded matrices, and sequence parallelism between them
pipeline         one executor for every schedule
expert           expert parallelism for mixtures of experts
context          attention over a sequence split across ranks
spec             specifications that check an implementation: ours, or a learner's
train            training on any mesh, checked against one process
exercises        pieces for a learner to write, checked by the specifications
museum           real bugs that can be run, and what finds them
quiz             the interview book, and a quiz from it
flags            configurations as command-line flags
report           progress bar, figures and summary of a run
cli              the `minipar` command
__main__         `python -m minipar`

The names most programs need are exported here: `minipar.run`, `minipar.Mesh`, `minipar.DDP` and so on. Each is imported
on first use, so `import minipar` does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
