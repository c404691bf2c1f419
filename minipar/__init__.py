"""minipar: distributed training, every piece written by hand and proved equal to one process.

One model, one seed, one batch: every mesh gives the same numbers.

errors, trace          how a request is refused; what a rank did and when
comm                   how ranks talk, and the collectives
launch, worker         start ranks, here or under torchrun
mesh, placement        ranks and axes; what a local tensor is a part of
model                  the Transformer, for one process
data_parallel          DDP
train, cli             the main job
"""

from minipar.comm import Comm
from minipar.errors import RankError
from minipar.launch import init_from_env, run, shutdown
from minipar.mesh import Mesh

__all__ = ["Comm", "Mesh", "RankError", "init_from_env", "run", "shutdown"]
