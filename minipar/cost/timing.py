"""Seconds of a step, by part, and the fractions of the peak that they mean.

    step = m (slowest stage: compute + recompute + exposed messages of tp, cp, ep) + idle + messages of pp
           + exposed gradients + update

Samples in s slices are m s units of a mean slice each, but idle ranks wait for the largest.

tp and ep are waited for in every layer. A cp ring runs beside the attention that it feeds; gathered units (ZeRO-3) beside
the layer before; gradients, where the implementation overlaps them, beside the last microbatch's backward, but for a layer.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from minipar.cost.compression import CODECS, compressed_gradients
from minipar.cost.layout import Job, Layout
from minipar.cost.links import axis_links, collective_s, send_s
from minipar.cost.models import hardware_flops_per_token, model_flops_per_token
from minipar.cost.ranks import Held, ends_elems, held_elems, layer_kinds_elems, rank_kinds
from minipar.cost.slices import largest_share
from minipar.cost.stages import idle_s, message_hops
from minipar.cost.traffic import cp_layer_bytes, dispatch_bytes, hidden_bytes, message_bytes, tp_sums
from minipar.cost.work import (
    Seconds,
    core_again_seconds,
    core_seconds,
    head_seconds,
    layer_seconds,
    optimizer_seconds,
)

PARTS = ("compute", "recompute", "tp", "cp", "ep", "zero3", "idle", "pp", "gradients", "update")


class StepTime(NamedTuple):
    """Seconds of a step by part, and utilization of the GPUs' peak.

    mfu  the model's own FLOPs    hfu  with those that are computed again
    """

    parts: dict[str, float]
    mfu: float
    hfu: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def communication(self) -> float:
        """Seconds that are waited for messages."""
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


def step_parts(job: Job, layout: Layout, compress: str = "none") -> dict[str, float]:
    """Return the seconds of a step by PARTS."""
    a, m = layout, layout.microbatches(job)
    units, largest = m * a.slices, largest_share(job, a.tp, a.slices) if a.slices > 1 else 1.0
    kinds = rank_kinds(job, a.schedule, a.pp, a.chunks)
    layer = _layer_layout(a)
    works = [_rank_work(job, layer, *held[2:4], held.last) for held in kinds]
    held, work = max(zip(kinds, works), key=lambda pair: pair[1].seconds.total)
    parts = {name: units * seconds for name, seconds in work.parts.items()}
    parts["idle"] = parts["pp"] = 0.0
    if a.pp > 1:
        parts["idle"] = largest * idle_s(a.schedule, a.pp, *_others(a.pp, kinds, works, work), a.chunks)
        parts["pp"] = message_hops(a.schedule, a.pp, m, a.chunks, a.slices) * _message_s(job, a)
    parts["gradients"], parts["update"] = _after_backward(job, a, held, work, compress)
    return parts


def stage_seconds(job: Job, a: Layout, held: Held) -> float:
    """Return the seconds of one microbatch on a rank that holds this, with its part of exposed gradients and the update."""
    work = _rank_work(job, _layer_layout(a), *held[2:4], held.last)
    return work.seconds.total + sum(_after_backward(job, a, held, work)) / a.microbatches(job)


def _after_backward(
    job: Job, a: Layout, held: Held, work: RankWork, compress: str = "none"
) -> tuple[float, float]:
    """Seconds of the gradients and gathered parameters that nothing hides, and of the update."""
    elems = held_elems(job, a, held), ends_elems(job, a.tp, held.first, held.last)
    reduce_s, gather_s, updated = _gradients(job, a.dp, a.cp, a.ep, a.tp, a.zero, *elems)
    exposed, codec = reduce_s, None
    if compress != "none":
        codec = compressed_gradients(job, a, elems[0], compress)
        exposed = reduce_s = codec.messages_s
    if job.implementation.overlap_gradients and (codec is None or CODECS[compress].hides):
        last = 1 / held.num_layers  # the layer whose gradients come last, with nothing behind which to hide
        backward = work.seconds.input_gradient + work.seconds.weight_gradient
        exposed = max(reduce_s - backward * (1 - last), reduce_s * last)
    if codec is not None:
        exposed += codec.codec_s
    return exposed + gather_s, optimizer_seconds(job, updated)


def _others(pp: int, kinds, works, slowest: RankWork) -> Seconds:
    """Return the mean F, I and W of all pipeline ranks but the slowest: while these fill and drain, it is idle."""
    sums = (sum(held.count * w.seconds[op] for held, w in zip(kinds, works)) for op in range(3))
    return Seconds(*((total - slowest.seconds[op]) / (pp - 1) for op, total in enumerate(sums)))


def _message_s(job: Job, a: Layout) -> float:
    message = send_s(job.machine, a, message_bytes(job, a) / a.slices)
    if job.implementation.scatter_pipeline:
        links = axis_links(job.machine, a, "tp")
        message += collective_s(job.machine, links, "all_gather", hidden_bytes(job, a) / a.slices)
    return message


class RankWork(NamedTuple):
    """Of one microbatch, or a mean slice, on one rank: seconds by part; F, I and W with what is waited for in each."""

    parts: dict[str, float]
    seconds: Seconds


def _layer_layout(a: Layout) -> Layout:
    """Return what a layer's time depends on, the rest by its default: data-parallel ranks only if they gather weights."""
    dp, zero = (a.dp, 3) if a.zero == 3 else (1, 0)
    return Layout(
        dp, 1, a.cp, a.ep, a.tp, zero, "1f1b", 1, a.microbatch, a.recompute, a.cp_attention, a.slices
    )


def least_seconds(job: Job, a: Layout) -> float:
    """Return a lower bound of a step: layers and head spread evenly over pp; no idle time, pp, gradients, update."""
    layer, work, moe = _layer_layout(a), 0.0, job.shape.num_moe_layers
    for number, experts in ((job.shape.num_layers - moe, False), (moe, True)):
        if number:
            parts = _layer_parts(job, layer, experts)
            work += number * (
                parts.work.total + parts.again + sum(parts.forward.values()) + sum(parts.backward.values())
            )
    work += head_seconds(job, a.tokens(job) / a.slices, a.tp).total
    return a.microbatches(job) * a.slices * work / a.pp * (1 - 1e-9)  # sums in another order may be larger


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
    """Of one layer and microbatch, or a mean slice: arithmetic, and seconds waited for forward and backward by part."""

    work: Seconds
    again: float
    forward: dict[str, float]
    backward: dict[str, float]


@cache
def _layer_parts(job: Job, a: Layout, experts: bool) -> LayerParts:
    machine, tokens, s = job.machine, a.tokens(job) / a.slices, a.slices
    work = layer_seconds(job, tokens, a.tp, experts)
    again = work.forward if a.unit else 0.0
    if a.recompute == "selective":
        again = core_again_seconds(job, tokens, a.tp)
    times = tp_sums(job, a, experts)
    all_reduce = collective_s(machine, axis_links(machine, a, "tp"), "all_reduce", hidden_bytes(job, a) / s)
    forward, backward = {"tp": times[0] * all_reduce}, {"tp": times[1] * all_reduce}
    if experts:
        each = collective_s(machine, axis_links(machine, a, "ep"), "all_to_all", dispatch_bytes(job, a) / s)
        forward["ep"], backward["ep"] = 2 * each, 2 * each * (2 if a.unit else 1)
    if a.cp > 1:
        forward["cp"], backward["cp"] = (
            _exposed_ring(job, a) if a.cp_attention == "ring" else _waited_cp(job, a)
        )
    if a.zero == 3:
        dense, expert = layer_kinds_elems(job, a.tp, a.ep)[experts]
        gather = collective_s(
            machine, axis_links(machine, a, "dp"), "all_gather", dense * job.bytes_of.weight
        )
        gather += collective_s(
            machine, axis_links(machine, a, "edp"), "all_gather", expert * job.bytes_of.weight
        )
        forward["zero3"] = max(0.0, gather - work.forward)
        backward["zero3"] = max(0.0, gather - again - work.input_gradient - work.weight_gradient)
    return LayerParts(work, again, forward, backward)


def _exposed_ring(job: Job, a: Layout) -> tuple[float, float]:
    """Seconds of a cp ring, forward and backward, beyond the attention core that runs beside it."""
    links, tokens = axis_links(job.machine, a, "cp"), a.tokens(job)
    core = core_seconds(job, tokens, a.tp)
    slowest = min([links.inside] * (links.per_node > 1) + [links.between] * (links.nodes > 1))
    latency = job.machine.network_latency_s if links.nodes > 1 else job.machine.link_latency_s
    hops = (a.cp - 1) * (job.machine.start_latency_s + latency)
    seconds = [hops + num_bytes / slowest for num_bytes in cp_layer_bytes(job, a)]
    return max(0.0, seconds[0] - core), max(0.0, seconds[1] - 2.5 * core)


def _waited_cp(job: Job, a: Layout) -> tuple[float, float]:
    """Seconds of the messages of ulysses, or of gathering keys and values and summing their gradients, per layer."""
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
def _gradients(job, dp, cp, ep, tp, zero, elems, ends) -> tuple[float, float, float]:
    """(reduction, gathering of updated or root parameters, elements that a rank updates)."""
    machine, b, a = job.machine, job.bytes_of, Layout(dp, 1, cp, ep, tp)
    kind = "reduce_scatter" if zero else "all_reduce"
    reduce_s = gather_s = updated = 0.0
    for axis, number in zip(("dp", "edp"), elems):
        links = axis_links(machine, a, axis)
        reduce_s += collective_s(machine, links, kind, number * b.gradient) if number else 0.0
        gathered = {0: 0, 3: ends if axis == "dp" else 0}.get(zero, number)
        gather_s += collective_s(machine, links, "all_gather", gathered * b.weight) if gathered else 0.0
        updated += number / (links.size if zero else 1)
    return reduce_s, gather_s, updated
