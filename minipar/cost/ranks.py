"""The contents of each pipeline rank (layers, embedding, head) and the number of its parameters."""

from __future__ import annotations

from functools import cache

from minipar.cost.layout import Job, Layout
from minipar.cost.models import layer_elems, layer_matmul_elems
from minipar.cost.stages import RankContents, stage_layers, stages_of

Contents = tuple[int, int, bool, bool]  # num_layers, num_moe, first, last


def head_layers(job: Job) -> float:
    """Return the head's cost divided by an average layer's cost, which counts the matrices and attention's products."""
    shape = job.shape
    layer = sum(layer_matmul_elems(shape, i) for i in range(shape.num_layers)) / shape.num_layers
    return shape.dim * shape.vocab_size / (layer + shape.q_dim * job.seq_len)


@cache
def rank_kinds(job: Job, schedule: str, pp: int, chunks: int) -> tuple[RankContents, ...]:
    """Return the distinct contents of the pipeline ranks, in the order in which they first occur."""
    ranks_by_contents: dict[Contents, list[int]] = {}
    for rank, held in enumerate(_all_held(job, schedule, pp, chunks)):
        ranks_by_contents.setdefault(held, []).append(rank)
    return tuple(RankContents(ranks[0], len(ranks), *held) for held, ranks in ranks_by_contents.items())


def held_by(job: Job, layout: Layout, rank: int) -> RankContents:
    """Return the contents of the rank with pp coordinate `rank`."""
    return RankContents(rank, 1, *_all_held(job, layout.schedule, layout.pp, layout.chunks)[rank])


@cache
def _all_held(job: Job, schedule: str, pp: int, chunks: int) -> tuple[Contents, ...]:
    num_stages = pp * chunks
    ends, moe = [0], [0]
    for size in stage_layers(job.shape.num_layers, num_stages, head_layers(job)):
        ends.append(ends[-1] + size)
        moe.append(sum(job.shape.has_experts(i) for i in range(ends[-1])))
    return tuple(
        (
            sum(ends[s + 1] - ends[s] for s in stages),
            sum(moe[s + 1] - moe[s] for s in stages),
            0 in stages,
            num_stages - 1 in stages,
        )
        for stages in (stages_of(schedule, rank, pp, chunks) for rank in range(pp))
    )


@cache
def layer_kinds_elems(job: Job, tp: int, ep: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the numbers of (dense, expert) parameters of a layer without experts, and those of a layer with experts."""
    shape, fold = job.shape, job.implementation.fold_experts
    without = layer_elems(shape, 0, tp, ep) if not shape.has_experts(0) else (0, 0)
    return without, layer_elems(shape, shape.first_moe_layer, tp, ep, fold) if shape.num_experts else (0, 0)


def held_elems(job: Job, layout: Layout, held: RankContents) -> tuple[int, int]:
    """Return (dense, expert): the numbers of parameters that a rank with these contents holds, before ZeRO."""
    without, with_experts = layer_kinds_elems(job, layout.tp, layout.ep)
    dense = (held.num_layers - held.num_moe) * without[0] + held.num_moe * with_experts[0]
    return dense + ends_elems(job, layout, held), held.num_moe * with_experts[1]


def ends_elems(job: Job, layout: Layout, held: RankContents) -> int:
    """Return the number of parameters outside the layers on a rank with these contents: those of the two end stages."""
    first, last = end_stages_elems(job, layout)
    return held.first * first + held.last * last


def end_stages_elems(job: Job, layout: Layout) -> tuple[int, int]:
    """Return the numbers of parameters outside the layers on the (first, last) stage.

    The first stage has the embedding and positions; the last stage has the last norm and the head. Without a pipeline, a
    head tied to the embedding is the embedding; with a pipeline it is a copy, also where one rank has both stages.
    """
    shape = job.shape
    table = table_elems(job, layout)
    shared = shape.tie_embeddings and layout.pp == 1
    return table + shape.positions * shape.dim, shape.norm_params * shape.dim + table * (not shared)


def table_elems(job: Job, layout: Layout) -> int:
    """Return the number of elements of the embedding's weight on a rank, which are as many as the head's."""
    return job.shape.vocab_size * job.shape.dim // layout.tp


def unsharded_elems(job: Job, layout: Layout, held: RankContents) -> int:
    """Return the number of dense parameters on a rank that ZeRO-3 does not shard.

    In a pipeline with tied embeddings it shards none outside the layers, since embedding and head exchange gradients.
    """
    if layout.zero < 3 or layout.pp == 1 or not job.shape.tie_embeddings:
        return 0
    return ends_elems(job, layout, held)


def bucket_elems(job: Job, layout: Layout) -> float:
    """Return the number of gradients that are sent at once over the data-parallel ranks; with ZeRO-3, those of a layer.

    Source of the default: Megatron Core, megatron/core/distributed/distributed_data_parallel.py.
    """
    how = job.implementation
    if how.bucket_layers or layout.zero == 3:
        return max(map(sum, layer_kinds_elems(job, layout.tp, layout.ep)))
    if how.bucket_mb is not None:
        return how.bucket_mb * 2**20 / job.bytes_of.gradient
    return max(40e6, 1e6 * layout.dp * layout.cp)
