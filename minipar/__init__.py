"""minipar: distributed training, every piece written by hand and proved equal to one process.

One model, one seed, one batch: every mesh gives the same numbers.

errors, trace                 how a request is refused; what a rank did and when
comm                          how ranks talk, and the collectives
launch, pool, worker, payload start ranks, here or under torchrun
mesh, placement, boxes        ranks and axes; what a local tensor is a part of
model                         the Transformer, for one process
data_parallel                 DDP, ZeRO-1, ZeRO-2, FSDP
tensor_parallel               matrices cut over ranks, and sequences between them
pipeline                      schedules as data, and one executor
expert                        mixtures of experts spread over ranks
context                       attention over tokens that other ranks hold
train, cli                    the main job: any mesh, and the proof

What a program needs most is here: `minipar.run`, `minipar.Mesh`, `minipar.DDP` and so on.
"""

from importlib import import_module

from minipar.comm import Comm
from minipar.errors import RankError
from minipar.launch import init_from_env, run, shutdown
from minipar.mesh import Mesh

# Imported when asked for, so that `import minipar` costs little.
_HOMES = {
    "minipar.model": ("ModelConfig", "Transformer", "flash_attention"),
    "minipar.data_parallel": ("DDP", "FSDP", "ZeroOptimizer"),
    "minipar.tensor_parallel": (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "vocab_parallel_cross_entropy",
    ),
    "minipar.pipeline": ("Pipeline", "partition", "simulate"),
    "minipar.expert": ("SwitchMoE",),
    "minipar.context": ("ring_attention", "ulysses_attention"),
    "minipar.train": ("TrainConfig", "clip_grad_norm_", "verify"),
}

__all__ = ["Comm", "Mesh", "RankError", "init_from_env", "run", "shutdown"]
__all__ += [name for names in _HOMES.values() for name in names]


def __getattr__(name: str):
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'minipar' has no attribute {name!r}")
