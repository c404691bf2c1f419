"""The library in the shape in which the specifications call an implementation."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import minipar
from minipar import schedules
from minipar.comm import autograd, halving_doubling, hierarchical
from minipar.context import attention_ring
from minipar.context.token_layout import local_runs
from minipar.expert.dispatch import AllToAll
from minipar.inference.blocks import BlockMemory, BlockPool, Pass, Rows
from minipar.inference.paged_model import PagedCore
from minipar.inference.policy import FirstCome
from minipar.inference.request import Request
from minipar.inference.scheduler import Scheduler, Sequence
from minipar.inference.speculative import accept_or_resample
from minipar.mesh import Mesh, Placement, overlap
from minipar.model.attention import plain_attention
from minipar.model.cache import KeyValueCache
from minipar.model.flash import choose, flash_attention
from minipar.model.mask import Mask
from minipar.model.transformer import cross_entropy_sum
from minipar.spec import SPECIFICATIONS
from minipar.spec.pipeline import gpipe_peak, one_f_one_b_peak
from minipar.spec.pipeline import specification as pipeline_specification
from minipar.tensor_parallel.parallel_linear import project_together
from minipar.tensor_parallel.sequence import TOKEN_DIM, SequenceParallelRMSNorm

CPU = torch.device("cpu")
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
    return minipar.VocabParallelEmbedding(w, comm.size * len(w), comm)(tokens)


def pipeline(generator):
    def step(comm, module, loss_fn, inputs, targets, m, shape, dtype):
        runner = minipar.Pipeline([module], comm, generator(comm.size, m), loss_fn)
        comm.traffic.reset()  # of the digest of its schedule: the specification counts a step
        return runner.step(inputs, targets)

    return step


def switch(comm, x, router, gate, up, down, capacity_factor):
    E, D = router.shape
    layer = minipar.SwitchMoE(D, gate.shape[1], E, 1, capacity_factor, comm, balance_coef=1.0, z_coef=1.0).to(
        x.dtype
    )
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


def shift(comm, x):
    return comm.exchange(x, (comm.rank + 1) % comm.size, x.shape, x.dtype, (comm.rank - 1) % comm.size)


def all_reduce_(comm, x):
    return comm.all_reduce_(x, algorithm="ring")


def average_gradients(module, comm):
    for p in module.parameters():
        p.grad = comm.all_reduce(p.grad, "mean")


def global_loss(comm, logits, targets):
    return cross_entropy_sum(logits, targets) / comm.all_reduce((targets != -100).sum())


def grad_norm(comm, grads, copies):
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads):
        p.grad = g.clone()
    return minipar.clip_grad_norm_(params, float("inf"), comm, shares=[1 / n for n in copies])


def placement(box) -> Placement:
    starts, ends = zip(*box)
    return Placement("matrix", (60, 50), starts, [end - start for start, end in zip(starts, ends)])


def reshard(boxes, load, wanted):
    """As a checkpoint reads a tensor (`minipar.train.checkpoint.restore.Checkpoint`)."""
    wanted, out = placement(wanted), None
    missing = wanted.numel
    for i, saved in enumerate(map(placement, boxes)):
        for box, source, target in overlap(saved, wanted):
            part = load(i)
            out = part.new_empty(wanted.local_shape) if out is None else out
            target.of_local(out, box).copy_(source.of_local(part, box))
            missing -= box.numel
    if missing:
        raise ValueError(f"{missing} elements are in no file")
    return out


def dispatch(comm, rows, counts, gate, up, down):
    arriving = AllToAll(comm)(rows, counts)
    arrived, per_expert = arriving.receive()
    parts = zip(arrived.split(per_expert), gate, up, down)
    return arriving.combine(torch.cat([(F.silu(x @ g.t()) * (x @ u.t())) @ d.t() for x, g, u, d in parts]))


def ring(comm, q, causal: bool) -> attention_ring.Ring:
    length = q.shape[2] * comm.size
    runs = [local_runs(length, rank, comm.size, "contiguous") for rank in range(comm.size)]
    masks = [Mask(runs[comm.rank], theirs, causal, None, None) for theirs in runs]
    return attention_ring.Ring(comm, masks.__getitem__, choose("auto", q, masks[comm.rank]))


class Saved(SimpleNamespace):
    """What autograd hands from a Function's forward to its backward."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


def ring_forward(comm, q, k, v, causal=True):
    ctx = Saved()
    out = attention_ring._RingAttention.forward(ctx, q, k, v, ring(comm, q, causal))
    return out, ctx.saved_tensors[-1]


def ring_backward(comm, q, k, v, out, lse, dout, causal=True):
    lse = lse.to(torch.promote_types(lse.dtype, torch.float32))  # as ring_forward returns it
    ctx = Saved(ring=ring(comm, q, causal), saved_tensors=(q, k, v, out, lse))
    return attention_ring._RingAttention.backward(ctx, dout)[:3]


def paged_attention(memory, size, pieces, q, k, v):
    own = BlockMemory(BlockPool(memory.shape[1], size), memory.shape[3], memory.shape[4], memory.dtype, CPU)
    own.data = memory
    of_pass = Pass.of([Rows(*piece) for piece in pieces], size, CPU, most_together=40)
    return PagedCore(plain_attention, own, of_pass)(q, k, v)


class Cache:
    def __init__(self):
        self.memory = KeyValueCache(max_tokens=110)

    def __call__(self, q, k, v):
        return plain_attention(q, *self.memory.extend(k, v))

    def cut(self, length):
        self.memory.length = length


class SchedulerOfTheLibrary:
    """The library's scheduler, asked for one plan at a time; what it decides is done to the caller's texts."""

    def plan(self, pool, waiting, budget):
        blocks = BlockPool(len(pool.free) + sum(len(text.table) for text in waiting), pool.size)
        scheduler = Scheduler(blocks, FirstCome(), budget, max_running=len(waiting) or 1)
        for number, text in enumerate(waiting):
            table = [blocks.allocate() for _ in text.table]
            request = Request(tuple(text.tokens), text.end - len(text.tokens))
            scheduler.add(Sequence(number, request, list(text.tokens), table, text.num_read))
        plan = scheduler.plan()
        for sequence, _ in plan.preempted:
            pool.release(waiting[sequence.number].table)
            waiting[sequence.number].num_read = 0
        pieces = [(waiting[read.sequence.number], read.count) for read in plan.reads]
        for text, count in pieces:
            assert pool.grow(text.table, text.num_read + count)
        return [(text, text.unread[:count]) for text, count in pieces]

    def advance(self, pool, pieces, chosen):
        for (text, tokens), token in zip(pieces, chosen):
            text.num_read += len(tokens)
            text.tokens += [token] * (not text.unread)
            if len(text.tokens) == text.end:
                pool.release(text.table)


COLLECTIVES = {  # the algorithms whose bytes are the formulas
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "all_reduce": "ring",
    "broadcast": "tree",
    "all_to_all": "pairwise",
}
LIBRARY = {
    "shift": shift,
    "all_reduce_": all_reduce_,
    "halving_doubling": halving_doubling.all_reduce,
    "hierarchical": hierarchical.all_reduce,
    "average_gradients": average_gradients,
    "global_loss": global_loss,
    "grad_norm": grad_norm,
    "reshard": reshard,
    "dispatch": dispatch,
    "ring_forward": ring_forward,
    "ring_backward": ring_backward,
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
    "kv_cache": Cache,
    "paged_attention": SimpleNamespace(BlockPool=BlockPool, paged_attention=paged_attention),
    "accept_or_resample": accept_or_resample,
    "scheduler_step": SchedulerOfTheLibrary(),
}
