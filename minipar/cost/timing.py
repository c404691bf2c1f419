"""Time of a training step, by part, and the utilization of the GPUs that follows from it (MFU and HFU).

    step = m (slowest stage: compute + recompute + exposed messages of tp, cp, ep) + idle + messages of pp
           + exposed gradients + update

With s slices per sample, the m s slices run one after another, and each counts with the time of the average slice. Idle
time counts with the time of the largest slice.

Every layer waits for its tp and ep messages. A cp ring overlaps with the attention that it feeds, but splits it into blocks
and merges their results. Other messages overlap with arithmetic: ZeRO-3's gathers and reductions with the arithmetic of
the layer before; gradients, if the implementation overlaps them, with the last microbatch's backward, except for one layer.
At most the fraction `overlap` of these messages is hidden, since messages and arithmetic share the GPU and its memory, and
a late message delays every rank:

    exposed = max(messages - arithmetic they overlap with, (1 - overlap) messages)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil
from typing import NamedTuple, Protocol

from minipar.cost.layout import PARTIAL, Job, Layout
from minipar.cost.links import Links, axis_links, collective_s, latency_and_bytes_s, message_s, send_s
from minipar.cost.models import hardware_flops_per_token, model_flops_per_token
from minipar.cost.ranks import bucket_elems, held_elems, layer_kinds_elems, rank_kinds, unsharded_elems
from minipar.cost.stages import RankContents, forms_of, idle_s, message_hops
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
    copy_seconds,
    core_again_seconds,
    core_seconds,
    head_seconds,
    layer_seconds,
    optimizer_seconds,
    partly_again_seconds,
    ring_extra_seconds,
)

PARTS = ("compute", "recompute", "tp", "cp", "ep", "zero3", "idle", "pp", "gradients", "update")


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


def step_time(job: Job, layout: Layout) -> StepTime:
    """Return the predicted time of one training step."""
    parts = step_parts(job, layout)
    tokens = job.batch * job.seq_len
    done = sum(parts.values()) * job.gpus * job.machine.peak_flops
    model = model_flops_per_token(job.shape, job.seq_len) * tokens / done
    return StepTime(
        parts, model, hardware_flops_per_token(job.shape, job.seq_len, layout.recompute) * tokens / done
    )


class GradientTerm(Protocol):
    """The time to reduce gradients in another form, such as compressed.

    elems  the numbers of (dense, expert) elements on a rank
    hides  whether the messages may overlap with the backward, as those of uncompressed gradients do
    """

    @property
    def hides(self) -> bool: ...

    def messages_s(self, job: Job, layout: Layout, elems: tuple[int, int]) -> float:
        """Return the time that messages take in a step."""

    def codec_s(self, job: Job, layout: Layout, elems: tuple[int, int]) -> float:
        """Return the time of encoding and decoding, which overlap with nothing."""


def step_parts(job: Job, layout: Layout, gradients: GradientTerm | None = None) -> dict[str, float]:
    """Return the time of each of PARTS in a step. `gradients` replaces the reduction of uncompressed gradients."""
    a, m = layout, layout.microbatches(job)
    units = m * a.slices
    largest = forms_of(a.schedule).largest_share(job, a)
    kinds = rank_kinds(job, a.schedule, a.pp, a.chunks)
    layer = _layer_layout(a)
    works = [_rank_work(job, layer, *held[2:4], held.last) for held in kinds]
    held, work = max(zip(kinds, works), key=lambda pair: pair[1].seconds.total)
    parts = {name: units * seconds for name, seconds in work.parts.items()}
    parts["idle"] = parts["pp"] = 0.0
    if a.pp > 1:
        parts["idle"] = largest * idle_s(a.schedule, a.pp, *_others(a.pp, kinds, works, work), a.chunks)
        parts["pp"] = message_hops(a.schedule, a.pp, m, a.chunks, a.slices) * _message_s(job, a)
    parts["zero3"] += _root_s(job, a, held)
    parts["gradients"], parts["update"] = _after_backward(job, a, held, work, gradients)
    return parts


def stage_seconds(job: Job, a: Layout, held: RankContents) -> float:
    """Return the time per microbatch on a rank with contents `held`; gradients and update are spread over microbatches."""
    work = _rank_work(job, _layer_layout(a), *held[2:4], held.last)
    once_a_step = _root_s(job, a, held) + sum(_after_backward(job, a, held, work))
    return work.seconds.total + once_a_step / a.microbatches(job)


def _root_s(job: Job, a: Layout, held: RankContents) -> float:
    """Return the time per step to gather the parameters outside the layers under ZeRO-3, which overlaps with nothing."""
    if a.zero < 3:
        return 0.0
    links, weight = sharding_links(job, a, "dp")[0], job.bytes_of.weight
    roots = root_gathers(job, a, held)
    return sum(n * collective_s(job.machine, links, "all_gather", root * weight) for root, n in roots if root)


def _after_backward(
    job: Job, a: Layout, held: RankContents, work: RankWork, term: GradientTerm | None = None
) -> tuple[float, float]:
    """Return (messages, update): the exposed time to reduce gradients and gather updated parameters; the update's time."""
    elems, unsharded = held_elems(job, a, held), unsharded_elems(job, a, held)
    sharded = elems[0] - unsharded, elems[1]
    reduce_s, gather_s, updated = _gradients(job, a.dp, a.cp, a.ep, a.tp, a.zero, sharded)
    if unsharded:
        whole_s, _, whole = _gradients(job, a.dp, a.cp, a.ep, a.tp, 0, (unsharded, 0))
        reduce_s, updated = reduce_s + whole_s, updated + whole
    codec_s, hides = 0.0, job.implementation.overlap_gradients
    if a.zero == 3 and job.implementation.reduce_every == "microbatch":
        reduce_s = 0.0  # these reductions are counted in the layers' time
    if term is not None:
        reduce_s, codec_s = term.messages_s(job, a, elems), term.codec_s(job, a, elems)
        hides = hides and term.hides
    exposed = reduce_s
    if hides:
        last = 1 / held.num_layers  # the last layer's gradients have no backward left to overlap with
        backward = work.seconds.input_gradient + work.seconds.weight_gradient
        hidden = min(backward * (1 - last), job.implementation.overlap_with(a.zero) * reduce_s)
        exposed = max(reduce_s - hidden, reduce_s * last)
    if job.implementation.overlap_params:
        gather_s = _exposed(gather_s, work.seconds.forward, job.implementation.overlap)
    if num_bytes := tied_bytes(job, a):  # exchanged at the end of the step, by whichever rank ends last
        exposed += send_s(job.machine, a, num_bytes)
    return exposed + codec_s + gather_s, optimizer_seconds(job, updated)


def _others(pp: int, kinds: Sequence[RankContents], works: Sequence[RankWork], slowest: RankWork) -> Seconds:
    """Return the mean times of F, I and W on the other pipeline ranks: while these fill and drain, the slowest idles."""
    sums = (sum(held.num_ranks * w.seconds[op] for held, w in zip(kinds, works)) for op in range(3))
    return Seconds(*((total - slowest.seconds[op]) / (pp - 1) for op, total in enumerate(sums)))


def _message_s(job: Job, a: Layout) -> float:
    message = send_s(job.machine, a, message_bytes(job, a) / a.slices)
    if job.implementation.scatter_pipeline:
        links = axis_links(job.machine, a, "tp")
        message += collective_s(job.machine, links, "all_gather", hidden_bytes(job, a) / a.slices)
    return message


class RankWork(NamedTuple):
    """The time of one microbatch (or average slice) on one rank: by part, and as F, I and W including their waits."""

    parts: dict[str, float]
    seconds: Seconds


def _layer_layout(a: Layout) -> Layout:
    """Reset every field of the layout that does not affect a layer's time, so that more layouts share a cached time.

    dp affects a layer's time only if ZeRO-3 gathers weights.
    """
    dp, zero = (a.dp, 3) if a.zero == 3 else (1, 0)
    return Layout(
        dp, 1, a.cp, a.ep, a.tp, zero, "1f1b", 1, a.microbatch, a.recompute, a.cp_attention, a.slices
    )


def least_seconds(job: Job, a: Layout) -> float:
    """Return a lower bound on the time of a step: an even share of the layers and the head.

    Idle time, messages between stages, gradients and the update are left out.
    """
    layer, work, moe = _layer_layout(a), 0.0, job.shape.num_moe_layers
    for number, experts in ((job.shape.num_layers - moe, False), (moe, True)):
        if number:
            parts = _layer_parts(job, layer, experts)
            work += number * (
                parts.work.total + parts.again + sum(parts.forward.values()) + sum(parts.backward.values())
            )
    work += head_seconds(job, a.tokens(job) / a.slices, a.tp).total
    # A lower bound must not exceed the exact time, in which the same terms, summed in another order, may round lower.
    return a.microbatches(job) * a.slices * work / a.pp * (1 - 1e-9)


@cache
def _rank_work(job: Job, layout: Layout, num_layers: int, num_moe: int, last: bool) -> RankWork:
    parts = dict.fromkeys(PARTS[:6], 0.0)
    tokens = layout.tokens(job) / layout.slices
    f, i, w = head = head_seconds(job, tokens, layout.tp) if last else Seconds(0.0, 0.0, 0.0)
    parts["compute"] = head.total
    for number, experts in ((num_layers - num_moe, False), (num_moe, True)):
        if not number:
            continue
        layer = _layer_parts(job, layout, experts)
        parts["compute"] += number * layer.work.total
        parts["recompute"] += number * layer.again
        f += number * (layer.work.forward + sum(layer.forward.values()))
        i += number * (layer.work.input_gradient + layer.again + sum(layer.backward.values()))
        w += number * layer.work.weight_gradient
        for waited in (layer.forward, layer.backward):
            for name, seconds in waited.items():
                parts[name] += number * seconds
    return RankWork(parts, Seconds(f, i, w))


class LayerParts(NamedTuple):
    """The time of one layer for one microbatch (or average slice), in seconds.

    work               arithmetic                again  recomputation
    forward, backward  waiting for messages, by part
    """

    work: Seconds
    again: float
    forward: dict[str, float]
    backward: dict[str, float]


@cache
def _layer_parts(job: Job, a: Layout, experts: bool) -> LayerParts:
    tokens, s = a.tokens(job) / a.slices, a.slices
    work = layer_seconds(job, tokens, a.tp, experts, a.ep)
    again = work.forward if a.unit else 0.0
    if a.recompute == "selective":
        again = core_again_seconds(job, tokens, a.tp)
    if a.recompute in PARTIAL:
        again = partly_again_seconds(job, a.recompute, tokens, a.tp, experts, a.ep)
    times = tp_sums(job, a, experts)
    one_sum = tp_sum_s(job, a, hidden_bytes(job, a) / s)
    forward, backward = {"tp": times[0] * one_sum}, {"tp": times[1] * one_sum}
    if experts:
        each, part = 2 * dispatch_s(job, a), job.implementation.expert_overlap
        forward["ep"] = _exposed(each, work.forward, part)
        backward["ep"] = _exposed(
            each * (2 if a.unit else 1), work.input_gradient + work.weight_gradient, part
        )
    if a.cp > 1:
        forward["cp"], backward["cp"] = _ring(job, a) if a.cp_attention == "ring" else _waited_cp(job, a)
    if a.zero == 3:
        gather, reduce = _unit_messages(job, a, experts)
        part = job.implementation.overlap_with(a.zero)
        forward["zero3"] = _exposed(gather, work.forward, part)
        behind = again + work.input_gradient + work.weight_gradient
        backward["zero3"] = _exposed((gathers(a) - 1) * gather + reduce, behind, part)
    return LayerParts(work, again, forward, backward)


def dispatch_s(job: Job, a: Layout) -> float:
    """Return the time of one all-to-all of a layer with experts.

    A token is sent k times. With `once_per_rank` it is sent only once to a rank that has several of its experts, and with
    `once_per_node` only once to another node. DeepEP does both (is_token_in_rank in its csrc/kernels).
    """
    how, machine, k = job.implementation, job.machine, job.shape.top_k
    links = axis_links(machine, a, "ep", how.fold_experts)
    once, nodes = dispatch_bytes(job, a) / a.slices / k, links.nodes
    num_bytes = once * (_places(job, a.ep) if how.once_per_rank else k)
    if nodes == 1 or not how.once_per_node or machine.collectives is not None:
        return collective_s(machine, links, "all_to_all", num_bytes)
    latency_s, _ = latency_and_bytes_s(machine, links, "all_to_all", once * k)
    away = once * _places(job, nodes) * (nodes - 1) / nodes
    inside = num_bytes * (links.per_node - 1) / links.per_node
    return message_s(latency_s, max(inside / links.inside, away / (links.between / links.per_node)))


def _places(job: Job, number: int) -> float:
    """Return on how many of `number` ranks or nodes the k experts of a token are, on average."""
    k, experts = job.shape.top_k, job.shape.num_experts
    if job.implementation.adjacent_experts:
        return max(1.0, k * number / experts)
    return number * (1 - (1 - 1 / number) ** k)


def tp_sum_s(job: Job, a: Layout, num_bytes: float) -> float:
    """Return the time of one sum of hidden states over tp.

    It is an all-reduce or, with sequence parallelism, its two halves: a reduce-scatter and an all-gather. With
    `joins_tokens` each half copies the whole vector: 2 n bytes read and 2 n written for n bytes.
    Source: torch/distributed/_functional_collectives.py, all_gather_tensor and reduce_scatter_tensor along a dim but 0.
    """
    links, how = axis_links(job.machine, a, "tp"), job.implementation
    kinds = ("reduce_scatter", "all_gather") if how.sequence_parallel else ("all_reduce",)
    messages_s = sum(collective_s(job.machine, links, kind, num_bytes) for kind in kinds)
    copied = how.joins_tokens and how.sequence_parallel and a.tp > 1
    return messages_s + (2 * copy_seconds(job, num_bytes) if copied else 0.0)


def _exposed(messages_s: float, arithmetic_s: float, overlap: float) -> float:
    """Return the time of the messages that does not overlap with the arithmetic; at most the fraction `overlap` does."""
    return messages_s - min(arithmetic_s, overlap * messages_s)


def _unit_messages(job: Job, a: Layout, experts: bool) -> tuple[float, float]:
    """Return (gather, reduce) for ZeRO-3: the times to all-gather a layer's weights once and to reduce its gradients once.

    `reduce` is 0 if gradients are reduced once per step instead of per microbatch: `_after_backward` counts that time.
    """
    machine, b, times = job.machine, job.bytes_of, job.implementation.gathers_per_layer
    reduces = job.implementation.reduce_every == "microbatch"
    gather = reduce = 0.0
    for axis, elems in zip(("dp", "edp"), layer_kinds_elems(job, a.tp, a.ep)[experts]):
        if elems:
            links, part = sharding_links(job, a, axis)[0], elems / times
            gather += times * collective_s(machine, links, "all_gather", part * b.weight)
            reduce += (
                reduces * times * collective_s(machine, links, "reduce_scatter", part * job.reduced_bytes)
            )
    return gather, reduce


def _ring(job: Job, a: Layout) -> tuple[float, float]:
    """Return (forward, backward): the time that ring attention adds to a layer.

    It consists of exposed messages, the lower kernel efficiency of smaller blocks, and the merging of partial results.
    """
    links, tokens = axis_links(job.machine, a, "cp"), a.tokens(job)
    core = core_seconds(job, tokens, a.tp)
    slowest = min([links.inside] * (links.per_node > 1) + [links.between] * (links.nodes > 1))
    latency = job.machine.network_latency_s if links.nodes > 1 else job.machine.link_latency_s
    hops = (a.cp - 1) * (job.machine.start_latency_s + latency)
    forward, backward = (hops + num_bytes / slowest for num_bytes in cp_layer_bytes(job, a))
    extra = ring_extra_seconds(job, tokens, a.tp, a.cp)
    return max(0.0, forward - core) + extra, max(0.0, backward - 2.5 * core) + 2.5 * extra


def _waited_cp(job: Job, a: Layout) -> tuple[float, float]:
    """Return (forward, backward): the time of a layer's cp messages, none of which overlap with arithmetic.

    They are Ulysses' all-to-alls, or the all-gather of keys and values and the reduce-scatter of their gradients.
    """
    links, sent = axis_links(job.machine, a, "cp"), cp_layer_bytes(job, a)
    whole = [num_bytes * a.cp / (a.cp - 1) for num_bytes in sent]
    if a.cp_attention == "ulysses":
        forward, backward = (collective_s(job.machine, links, "all_to_all", n) for n in whole)
        again = forward if a.unit else 0.0
        return forward, backward + again
    gather = collective_s(job.machine, links, "all_gather", whole[0])
    reduce = collective_s(job.machine, links, "reduce_scatter", whole[1] - whole[0])
    return gather, gather + reduce


@cache
def _gradients(
    job: Job, dp: int, cp: int, ep: int, tp: int, zero: int, elems: tuple[int, int]
) -> tuple[float, float, float]:
    """Return (time to reduce gradients, time to gather updated parameters, number of elements that a rank updates)."""
    b, a = job.bytes_of, Layout(dp, 1, cp, ep, tp, zero)
    kind = "reduce_scatter" if zero else "all_reduce"
    reduce_s = gather_s = updated = 0.0
    for axis, number in zip(("dp", "edp"), elems):
        links, copies = sharding_links(job, a, axis)
        if number:
            reduce_s += in_buckets_s(job, a, links, kind, number, job.reduced_bytes)
            reduce_s += in_buckets_s(job, a, copies, "all_reduce", number / links.size, job.reduced_bytes)
        if zero in (1, 2) and number:
            gather_s += in_buckets_s(job, a, links, "all_gather", number, b.weight)
        updated += number / (links.size if zero else 1)
    return reduce_s, gather_s, updated


def in_buckets_s(job: Job, a: Layout, links: Links, kind: str, elems: float, elem_bytes: int) -> float:
    """Return the time of collectives over all buckets of `elems` elements, one bucket after another."""
    buckets = max(1, ceil(elems / bucket_elems(job, a)))
    return buckets * collective_s(job.machine, links, kind, elems * elem_bytes / buckets)
