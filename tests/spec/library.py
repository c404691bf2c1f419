"""The library in the shape in which the specifications call an implementation."""

from functools import partial
from types import SimpleNamespace

import torch.nn.functional as F

import minipar
from minipar import Mesh, schedules
from minipar.comm import autograd
from minipar.model.flash import flash_attention
from minipar.spec import SPECIFICATIONS
from minipar.spec.pipeline import gpipe_peak, one_f_one_b_peak
from minipar.spec.pipeline import specification as pipeline_specification
from minipar.tensor_parallel.parallel_linear import project_together
from minipar.tensor_parallel.sequence import TOKEN_DIM, SequenceParallelRMSNorm

HEADER_BYTES = 80  # by which a stage tells the next one what it sends
SPECS = {
    **SPECIFICATIONS,
    "pipeline_gpipe": pipeline_specification("gpipe", gpipe_peak, HEADER_BYTES),
    "pipeline_one_f_one_b": pipeline_specification("one_f_one_b", one_f_one_b_peak, HEADER_BYTES),
}


def collective(name: str, algorithm: str):
    return lambda comm, x, *args: getattr(comm, name)(x, *args, algorithm=algorithm)


conjugates = SimpleNamespace(
    copy=autograd.copy,
    all_reduce=autograd.all_reduce,
    gather_tokens=partial(autograd.all_gather, dim=TOKEN_DIM),
    scatter_tokens=partial(autograd.reduce_scatter, dim=TOKEN_DIM),
)


def ddp(module, comm, bucket_mb=25.0):
    return minipar.DDP(module, comm, bucket_mb=bucket_mb)


def zero(stage: int):
    return lambda params, cls, comm, **options: minipar.ZeroOptimizer(
        params, cls, comm, stage=stage, **options
    )


def fsdp(module, comm, unit_class):
    return minipar.FSDP(module, comm, units=unit_class)


def mlp(comm, x, gate, up, down, **options):
    columns = [minipar.ColumnParallelLinear(w, None, comm, **options) for w in (gate, up)]
    gated, hidden = project_together(columns, x)
    return minipar.RowParallelLinear(down, None, comm, **options)(F.silu(gated) * hidden)


def attention(comm, x, q, k, v, o, head_dim=4):
    B, T, _ = x.shape
    projected = project_together([minipar.ColumnParallelLinear(w, None, comm) for w in (q, k, v)], x)
    q, k, v = (y.view(B, T, -1, head_dim).transpose(1, 2) for y in projected)
    mixed = flash_attention(q, k, v).transpose(1, 2).reshape(B, T, -1)
    return minipar.RowParallelLinear(o, None, comm)(mixed)


def sequence_parallel(comm, x, norm, gate, up, down, **options):
    shard_norm = SequenceParallelRMSNorm(SimpleNamespace(eps=1e-5, weight=norm), comm)
    return x + mlp(comm, shard_norm(x), gate, up, down, sequence_parallel=True, **options)


def vocab_embedding(comm, tokens, w):
    return minipar.VocabParallelEmbedding(w, comm.rank * len(w), comm)(tokens)


def pipeline(generator):
    def step(comm, module, loss_fn, inputs, targets, m, shape, dtype):
        return minipar.Pipeline([module], comm, generator(comm.size, m), loss_fn).step(inputs, targets)

    return step


def switch(comm, x, router, gate, up, down, capacity_factor):
    E, D = router.shape
    layer = minipar.SwitchMoE(
        D, gate.shape[1], E, 1, capacity_factor, comm, balance_coef=1.0, z_coef=1.0
    ).double()
    # The caller's own leaves are the layer's weights: their gradients are what is asked for.
    for module, weights in (
        (layer.router, dict(weight=router)),
        (layer.experts, dict(gate=gate, up=up, down=down)),
    ):
        for name, weight in weights.items():
            delattr(module, name)
            setattr(module, name, weight)
    y, metrics = layer(x)
    return y, metrics.balance_loss, metrics.z_loss, metrics.dropped


def mesh(*axes, **sizes):
    world = sizes.get("pp", 1) * sizes.get("dp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1)
    grid = Mesh(world, **sizes)
    return sorted({grid.group(rank, *axes) for rank in range(world)})


COLLECTIVES = {  # the algorithms whose bytes are the formulas
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "all_reduce": "ring",
    "broadcast": "tree",
    "all_to_all": "pairwise",
}
LIBRARY = {
    **{name: collective(name, algorithm) for name, algorithm in COLLECTIVES.items()},
    "conjugates": conjugates,
    "ddp": ddp,
    "zero1": zero(1),
    "zero2": zero(2),
    "fsdp": fsdp,
    "mlp": mlp,
    "attention": attention,
    "sequence_parallel": sequence_parallel,
    "vocab_embedding": vocab_embedding,
    "vocab_loss": minipar.vocab_parallel_cross_entropy,
    "pipeline_gpipe": pipeline(schedules.gpipe),
    "pipeline_one_f_one_b": pipeline(schedules.one_f_one_b),
    "schedule_gpipe": schedules.gpipe,
    "schedule_1f1b": schedules.one_f_one_b,
    "schedule_zb_h1": schedules.zb_h1,
    "switch": switch,
    "ring_attention": minipar.ring_attention,
    "ulysses_attention": minipar.ulysses_attention,
    "mesh": mesh,
}
