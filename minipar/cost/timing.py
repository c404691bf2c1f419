"""Time of a training step, by part, and the utilization of the GPUs that follows from it (MFU and HFU).

    step = m (slowest stage: compute + recompute + exposed messages of tp, cp, ep) + idle + messages of pp
           + exposed gradients + update

Messages that a program sends beside arithmetic are hidden in part, since both share the GPU and its memory, and a late
message delays every rank. A fraction of them hides at most, and no more of them than there is arithmetic:

    exposed = max((1 - fraction) messages, messages - arithmetic)

    gradients, ZeRO-0 to -2    0.9 behind the last microbatch's backward, and all but one layer's share
    ZeRO-3                     0.3 of what a layer gathers and reduces, behind that layer's arithmetic
    updated parameters         none, or with overlap_params 0.9 behind the first forward
    tp                         none, or with overlap_tp 0.8
    a cp ring                  all, behind attention; but it splits attention into blocks and merges their results
    ep, Ulysses, gathers of cp none

0.3 is fitted, 0.9 and 0.8 are not: the fitted runs hardly depend on them (docs/generated/planner.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from typing import NamedTuple

from minipar.cost.layout import Job, Layout
from minipar.cost.links import Links, axis_links, collective_s, latency_and_bytes_s, message_s, send_s
from minipar.cost.models import hardware_flops_per_token, model_flops_per_token
from minipar.cost.ranks import bucket_elems, held_elems, layer_kinds_elems, rank_kinds
from minipar.cost.stages import RankContents, idle_s
from minipar.cost.traffic import (
    cp_layer_bytes,
    dispatch_bytes,
    gathers,
    hidden_bytes,
    message_bytes,
    root_gathers,
    sharding_links,
    tied_bytes,
    tp_sums,
)
from minipar.cost.work import (
    Seconds,
    again_seconds,
    core_seconds,
    head_seconds,
    layer_seconds,
    optimizer_seconds,
    ring_extra_seconds,
)

PARTS = ("compute", "recompute", "tp", "cp", "ep", "zero3", "idle", "pp", "gradients", "update")
HIDDEN_GRADIENTS, HIDDEN_ZERO3, HIDDEN_TP = 0.9, 0.3, 0.8


class StepTime(NamedTuple):
    """The time of a step in seconds, by part, and utilization as a fraction of the GPUs' peak FLOPs.

    mfu  counts the model's FLOPs    hfu  also counts recomputed FLOPs
    """

    parts: dict[str, float]
    mfu: float
    hfu: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def communication(self) -> float:
        """The time spent waiting for messages."""
        return sum(self.parts[part] for part in ("tp", "cp", "ep", "zero3", "pp", "gradients"))


class Reduction(NamedTuple):
    """The time in a step to reduce gradients in another form, such as compressed.

    messages_s  of messages      codec_s  of encoding and decoding, which overlap with nothing
    hides       whether the messages may overlap with the backward, as those of uncompressed gradients do
    """

    messages_s: float
    codec_s: float
    hides: bool


# (dense, expert) elements on a rank -> how its gradients are reduced
Reduce = Callable[[tuple[int, int]], Reduction]


class RankWork(NamedTuple):
    """The time of one microbatch on one rank: by part, and as F, I and W including their waits."""

    parts: dict[str, float]
    seconds: Seconds


def step_time(job: Job, layout: Layout) -> StepTime:
    """Return the predicted time of one training step."""
    parts = step_parts(job, layout)
    per_flop = job.batch * job.seq_len / (sum(parts.values()) * job.gpus * job.machine.peak_flops)
    mfu = per_flop * model_flops_per_token(job.shape, job.seq_len)
    return StepTime(parts, mfu, per_flop * hardware_flops_per_token(job.shape, job.seq_len, layout.recompute))


def step_parts(job: Job, layout: Layout, reduce: Reduce | None = None) -> dict[str, float]:
    """Return the time of each of PARTS in a step. `reduce` replaces the reduction of uncompressed gradients."""
    a = layout
    kinds = rank_kinds(job, a.schedule, a.pp, a.chunks)
    layer = _layer_layout(a)
    works = [_rank_work(job, layer, held.num_layers, held.num_moe, held.last) for held in kinds]
    held, slowest = max(zip(kinds, works), key=lambda pair: pair[1].seconds.total)
    parts = {name: a.microbatches(job) * slowest.parts.get(name, 0.0) for name in PARTS}
    if a.pp > 1:
        # While the other ranks fill and drain the pipeline, the slowest idles: their mean time counts.
        sums = (sum(k.num_ranks * w.seconds[op] for k, w in zip(kinds, works)) for op in range(3))
        f, i, w = ((total - own) / (a.pp - 1) for total, own in zip(sums, slowest.seconds))
        parts["idle"] = idle_s(a.schedule, a.pp, f, i, w, a.chunks)
        parts["pp"] = 2 * (a.pp * a.chunks - 1) * send_s(job.machine, a, message_bytes(job, a))
    parts["zero3"] += _roots_s(job, a, held)
    parts["gradients"] = _gradients_s(job, a, held, slowest.seconds, reduce)
    parts["update"] = _update_s(job, a, held)
    return parts


def stage_seconds(job: Job, a: Layout, held: RankContents) -> float:
    """Return the time per microbatch on a rank with contents `held`; gradients and update are spread over microbatches."""
    work = _rank_work(job, _layer_layout(a), held.num_layers, held.num_moe, held.last).seconds
    once_a_step = _roots_s(job, a, held) + _gradients_s(job, a, held, work) + _update_s(job, a, held)
    return work.total + once_a_step / a.microbatches(job)


def least_seconds(job: Job, a: Layout) -> float:
    """Return a lower bound on the time of a step: an even share of the layers and the head.

    Idle time, messages between stages, gradients and the update are left out.
    """
    moe = job.shape.num_moe_layers
    work = _rank_work(job, _layer_layout(a), job.shape.num_layers, moe, True).seconds.total
    # A lower bound must not exceed the exact time, in which the same terms, summed in another order, may round lower.
    return a.microbatches(job) * work / a.pp * (1 - 1e-9)


def _layer_layout(a: Layout) -> Layout:
    """Reset every field of the layout that does not affect a layer's time, so that more layouts share a cached time.

    dp affects a layer's time only if ZeRO-3 gathers weights.
    """
    dp, zero = (a.dp, 3) if a.zero == 3 else (1, 0)
    return Layout(dp, 1, a.cp, a.ep, a.tp, zero, "1f1b", 1, a.microbatch, a.recompute, a.cp_attention)


@cache
def _rank_work(job: Job, a: Layout, num_layers: int, num_moe: int, last: bool) -> RankWork:
    head = head_seconds(job, a.tokens(job), a.tp) if last else Seconds(0.0, 0.0, 0.0)
    parts, seconds = {"compute": head.total}, head
    for number, experts in ((num_layers - num_moe, False), (num_moe, True)):
        if number:
            layer = _layer_work(job, a, experts)
            for name, each in layer.parts.items():
                parts[name] = parts.get(name, 0.0) + number * each
            seconds = Seconds(*(so_far + number * each for so_far, each in zip(seconds, layer.seconds)))
    return RankWork(parts, seconds)


@cache
def _layer_work(job: Job, a: Layout, experts: bool) -> RankWork:
    """Return the work of one layer. Each wait is a pair of seconds: in the forward, in the backward."""
    tokens = a.tokens(job)
    work = layer_seconds(job, tokens, a.tp, experts, a.ep)
    again = again_seconds(job, a.recompute, tokens, a.tp, experts, a.ep)
    behind = work.forward, again + work.input_gradient + work.weight_gradient
    waits = {"tp": _tp_s(job, a, experts, behind)}
    if experts:
        each = dispatch_s(job, a)
        waits["ep"] = 2 * each, (4 if a.unit else 2) * each
    if a.cp > 1:
        waits["cp"] = _ring_s(job, a) if a.cp_attention == "ring" else _waited_cp_s(job, a)
    if a.zero == 3:
        waits["zero3"] = _zero3_s(job, a, experts, behind)
    parts = {"compute": work.total, "recompute": again} | {name: sum(pair) for name, pair in waits.items()}
    forward, backward = (sum(pair[way] for pair in waits.values()) for way in (0, 1))
    f, i, w = work
    return RankWork(parts, Seconds(f + forward, i + again + backward, w))


# Messages, and what of them is exposed ----------------------------------------------------------------------------------


def _exposed(messages_s: float, arithmetic_s: float, fraction: float) -> float:
    """Return the time of messages that arithmetic does not hide: it hides at most this fraction of them."""
    return max((1 - fraction) * messages_s, messages_s - arithmetic_s)


def _tp_s(job: Job, a: Layout, experts: bool, behind: tuple[float, float]) -> tuple[float, float]:
    """Return the waits for sums of hidden states: all-reduces, or with sequence parallelism the two halves of each."""
    links, how, size = axis_links(job.machine, a, "tp"), job.implementation, hidden_bytes(job, a)
    kinds = ("reduce_scatter", "all_gather") if how.sequence_parallel else ("all_reduce",)
    each = sum(collective_s(job.machine, links, kind, size) for kind in kinds)
    fraction = HIDDEN_TP if how.overlap_tp else 0.0
    forward, backward = (_exposed(n * each, s, fraction) for n, s in zip(tp_sums(job, a, experts), behind))
    return forward, backward


def dispatch_s(job: Job, a: Layout) -> float:
    """Return the time of one all-to-all of a layer with experts.

    A token is sent k times. With `once_per_rank` it is sent once to a rank that has several of its experts, and once to
    another node, whose ranks copy it: on n of them, k experts drawn at random are on n (1 - (1 - 1/n)^k).
    Source: DeepEP, is_token_in_rank in its csrc/kernels.
    """
    how, machine, k = job.implementation, job.machine, job.shape.top_k
    links = axis_links(machine, a, "ep", how.fold_experts)
    once, nodes = dispatch_bytes(job, a) / k, links.nodes

    def places(n: int) -> float:
        if how.adjacent_experts:
            return max(1.0, k * n / job.shape.num_experts)
        return n * (1 - (1 - 1 / n) ** k)

    num_bytes = once * (places(a.ep) if how.once_per_rank else k)
    if nodes == 1 or not how.once_per_rank or machine.collectives is not None:
        return collective_s(machine, links, "all_to_all", num_bytes)
    latency_s, _ = latency_and_bytes_s(machine, links, "all_to_all", once * k)
    inside_s = num_bytes * (links.per_node - 1) / links.per_node / links.inside
    away_s = once * places(nodes) * (nodes - 1) / nodes / (links.between / links.per_node)
    return message_s(latency_s, max(inside_s, away_s))


def _ring_s(job: Job, a: Layout) -> tuple[float, float]:
    """Return the time that ring attention adds to a layer: exposed messages, slower small blocks, merged results."""
    links, tokens = axis_links(job.machine, a, "cp"), a.tokens(job)
    core, extra = core_seconds(job, tokens, a.tp), ring_extra_seconds(job, tokens, a.tp, a.cp)
    slowest = min([links.inside] * (links.per_node > 1) + [links.between] * (links.nodes > 1))
    latency = job.machine.network_latency_s if links.nodes > 1 else job.machine.link_latency_s
    hops = (a.cp - 1) * (job.machine.start_latency_s + latency)
    forward, backward = (hops + num_bytes / slowest for num_bytes in cp_layer_bytes(job, a))
    return max(0.0, forward - core) + extra, max(0.0, backward - 2.5 * core) + 2.5 * extra


def _waited_cp_s(job: Job, a: Layout) -> tuple[float, float]:
    """Return the time of Ulysses' all-to-alls, or of gathering keys and values and reducing their gradients."""
    links, (there, back) = axis_links(job.machine, a, "cp"), cp_layer_bytes(job, a)
    whole = a.cp / (a.cp - 1)
    if a.cp_attention == "ulysses":
        each = collective_s(job.machine, links, "all_to_all", whole * there)
        return each, (2 if a.unit else 1) * each
    gather = collective_s(job.machine, links, "all_gather", whole * there)
    return gather, gather + collective_s(job.machine, links, "reduce_scatter", whole * (back - there))


def _zero3_s(job: Job, a: Layout, experts: bool, behind: tuple[float, float]) -> tuple[float, float]:
    """Return the exposed time of a layer's gathers and, if gradients are reduced every microbatch, of its reduction."""
    machine, b = job.machine, job.bytes_of
    gather = reduce = 0.0
    for axis, elems in zip(("dp", "edp"), layer_kinds_elems(job, a.tp, a.ep)[experts]):
        if elems:
            links = sharding_links(job, a, axis)[0]
            gather += collective_s(machine, links, "all_gather", elems * b.weight)
            if job.implementation.reduce_every == "microbatch":
                reduce += collective_s(machine, links, "reduce_scatter", elems * job.reduced_bytes)
    forward, backward = behind
    again = (gathers(a) - 1) * gather + reduce
    return _exposed(gather, forward, HIDDEN_ZERO3), _exposed(again, backward, HIDDEN_ZERO3)


def _roots_s(job: Job, a: Layout, held: RankContents) -> float:
    """Return the time per step to gather the parameters outside the layers under ZeRO-3, which overlaps with nothing."""
    if a.zero < 3:
        return 0.0
    links, weight = sharding_links(job, a, "dp")[0], job.bytes_of.weight
    roots = root_gathers(job, a, held)
    return sum(n * collective_s(job.machine, links, "all_gather", root * weight) for root, n in roots if root)


def _gradients_s(
    job: Job, a: Layout, held: RankContents, work: Seconds, reduce: Reduce | None = None
) -> float:
    """Return the exposed time to reduce gradients, those of tied embeddings too, and to gather updated parameters."""
    how, elems, backward = (
        job.implementation,
        held_elems(job, a, held),
        work.input_gradient + work.weight_gradient,
    )
    reduce_s, gather_s = _all_gradients_s(job, Layout(a.dp, 1, a.cp, a.ep, a.tp, a.zero), elems)
    if a.zero == 3 and how.reduce_every == "microbatch":
        reduce_s = 0.0  # counted in the layers' time
    found = Reduction(reduce_s, 0.0, True) if reduce is None else reduce(elems)
    last = 1 / held.num_layers  # the last layer's gradients have no backward left to overlap with
    fraction = min(1 - last, HIDDEN_ZERO3 if a.zero == 3 else HIDDEN_GRADIENTS)
    hides = found.hides and how.overlap_gradients
    exposed = _exposed(found.messages_s, (1 - last) * backward, fraction if hides else 0.0)
    params = _exposed(gather_s, work.forward, HIDDEN_GRADIENTS if how.overlap_params else 0.0)
    tied = tied_bytes(job, a)
    return exposed + found.codec_s + params + (send_s(job.machine, a, tied) if tied else 0.0)


def _update_s(job: Job, a: Layout, held: RankContents) -> float:
    """Return the time of the optimizer's update, which reads and writes all of a rank's states."""
    sizes = (sharding_links(job, a, axis)[0].size if a.zero else 1 for axis in ("dp", "edp"))
    return optimizer_seconds(job, sum(n / size for n, size in zip(held_elems(job, a, held), sizes)))


@cache
def _all_gradients_s(job: Job, a: Layout, elems: tuple[int, int]) -> tuple[float, float]:
    """Return (time to reduce gradients, time to gather updated parameters)."""
    reduce_s = gather_s = 0.0
    for axis, number in zip(("dp", "edp"), elems):
        if number:
            links, copies = sharding_links(job, a, axis)
            kind = "reduce_scatter" if a.zero else "all_reduce"
            reduce_s += in_buckets_s(job, a, links, kind, number, job.reduced_bytes)
            reduce_s += in_buckets_s(job, a, copies, "all_reduce", number / links.size, job.reduced_bytes)
            if a.zero in (1, 2):
                gather_s += in_buckets_s(job, a, links, "all_gather", number, job.bytes_of.weight)
    return reduce_s, gather_s


def in_buckets_s(job: Job, a: Layout, links: Links, kind: str, elems: float, elem_bytes: int) -> float:
    """Return the time of collectives over all buckets of `elems` elements, one bucket after another."""
    buckets = max(1, ceil(elems / bucket_elems(job, a)))
    return buckets * collective_s(job.machine, links, kind, elems * elem_bytes / buckets)
