"""The cost of compressed gradients, and whether compression pays.

    seconds = bytes sent / bandwidth + passes * 4 bytes * gradients / memory bandwidth

A pass is one read or write of all gradients in memory. Encoding runs on the GPU that runs the backward, so the two do not
overlap. Messages of compressed gradients overlap with the backward, as uncompressed gradients do; a compressed momentum is
sent after the backward. So almost every codec pays over a 10 Gb/s link, and none over NVLink. The numbers of passes are
those of minipar's own code; a fused kernel makes fewer. The loss of quality is not predicted; lesson 14 measures it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from minipar.cost.layout import Implementation, Job, Layout
from minipar.cost.links import axis_links, collective_s
from minipar.cost.models import attention_elems
from minipar.cost.plan_command import Answer, Asked
from minipar.cost.ranks import held_by, held_elems
from minipar.cost.timing import Reduction, step_parts
from minipar.cost.traffic import gradients_bytes
from minipar.support.errors import one_of

SCALE_BYTES = 4 / 256  # bytes per element for the scale of its block
EVERY, RANK, FRACTION = 10, 4, 0.01  # `minipar train`'s defaults
DEFAULT = Implementation()


class Codec(NamedTuple):
    """The bytes that a method sends, and the number of times it reads or writes each element.

    sent_bytes  bytes per element in each phase; None for powersgd, whose bytes depend on the model's width
    passes      number of reads and writes of all elements in float32
    phases      the collectives that the method calls
    share       the fraction of steps that send anything
    hides       True if the messages overlap with the backward
    """

    sent_bytes: float | None
    passes: int
    phases: tuple[str, ...] = ("all_to_all", "all_gather")
    share: float = 1.0
    hides: bool = True


CODECS = {
    "sign": Codec(1 / 8 + SCALE_BYTES, 16),
    "int8": Codec(1 + SCALE_BYTES, 18),
    "fp8": Codec(1 + SCALE_BYTES, 18),
    "topk": Codec(8 * FRACTION, 24),
    "tagc": Codec(8 * FRACTION, 24),
    "powersgd": Codec(None, 8, ("all_reduce",)),
    "onebit-adam": Codec(1 / 8 + SCALE_BYTES, 16, hides=False),
    "onebit-lamb": Codec(1 / 8 + SCALE_BYTES, 26, hides=False),
    "zero-one-adam": Codec(1 / 8 + SCALE_BYTES, 20, share=1 / EVERY, hides=False),
    "diloco": Codec(4.0, 8, ("all_reduce",), 1 / EVERY, hides=False),
}
# Methods that need the unsharded optimizer state on each rank.
NEEDS_ZERO0 = ("onebit-adam", "onebit-lamb", "zero-one-adam", "diloco")


class Compressed(NamedTuple):
    """The cost of compressed gradients in a step: time of messages (which may overlap), time of encoding, bytes sent."""

    messages_s: float
    codec_s: float
    sent_bytes: float


def methods_for(layout: Layout, how: Implementation = DEFAULT) -> list[str]:
    """Return the methods that this layout can use: with ZeRO only those that compress gradients.

    A reduction after every microbatch is not compressed, nor the second reduction of hybrid sharding.
    """
    reduces_often = layout.zero > 1 and how.reduce_every == "microbatch"
    if layout.dp * layout.cp == 1 or reduces_often or (layout.zero == 3 and how.replicate > 1):
        return []
    local = ("zero-one-adam", "diloco") if layout.cp > 1 or layout.ep > 1 else ()
    whole = ("onebit-lamb",) if layout.tp > 1 or layout.ep > 1 else ()
    refused = (
        *local,
        *whole,
        *(NEEDS_ZERO0 if layout.zero else ()),
    )
    return [name for name in CODECS if name not in refused]


def compressed_gradients(job: Job, layout: Layout, elems: tuple[int, int], name: str) -> Compressed:
    """Return the mean cost per step of a method after the warm-up, for a rank with (dense, expert) elements `elems`."""
    machine, codec = job.machine, CODECS[name]
    messages = codec_s = sent = 0.0
    for axis, number in zip(("dp", "edp"), elems):
        links = axis_links(machine, layout, axis, job.implementation.fold_experts)
        if not number or links.size == 1:
            continue
        few, whole = _elements(job, name, number)
        num_bytes = few * _bytes_of(job, layout, codec)
        for kind in codec.phases:
            messages += codec.share * collective_s(machine, links, kind, num_bytes)
            rounds = 2 if kind == "all_reduce" else 1
            sent += codec.share * rounds * (links.size - 1) / links.size * num_bytes
        if whole:
            messages += collective_s(machine, links, "all_reduce", whole * job.bytes_of.gradient)
            sent += 2 * (links.size - 1) / links.size * whole * job.bytes_of.gradient
        codec_s += codec.passes * 4 * few / machine.hbm_bytes_per_s
    return Compressed(messages, codec_s, sent)


def _bytes_of(job: Job, layout: Layout, codec: Codec) -> float:
    """Return the bytes sent per element. PowerSGD's factors of a D x D/tp matrix (D^2/tp elements) have r (D + D/tp)."""
    if codec.sent_bytes is not None:
        return codec.sent_bytes
    return min(4.0, 4 * RANK * (1 + layout.tp) / job.shape.dim)


def _elements(job: Job, name: str, number: int) -> tuple[float, float]:
    """Return the numbers of elements (compressed, uncompressed); tagc compresses only the feed-forward layers."""
    if name != "tagc":
        return number, 0.0
    shape = job.shape
    feed_forward = 3 * shape.dim * shape.hidden_dim
    share = feed_forward / (feed_forward + attention_elems(shape))
    return share * number, (1 - share) * number


# The answer of `minipar plan --view compression` ------------------------------------------------------------------------


# Compression pays if a step takes less than this fraction; a smaller gain is within the model's error.
PAYS = 0.98


def check_method(name: str) -> None:
    """Raise ValueError, with the nearest name, if there is no such method."""
    if name not in ("auto", *CODECS):
        raise ValueError(f"view.method={name!r} is unknown; use {one_of(('auto', *CODECS), near=name)}")


def compression_view(asked: Asked, options: Any) -> Answer:
    """Say whether compression pays on the layout."""
    job, layout, name = asked.job, asked.layout, options.method
    assert layout is not None
    rows = compression_rows(job, layout, name)
    entries = {method: {"seconds": seconds, "sent_bytes": sent} for method, seconds, sent in rows}
    return Answer(advice(job, layout, name), {"compress": entries})


def compression_rows(job: Job, layout: Layout, name: str) -> list[tuple[str, float, float]]:
    """Return (method, seconds per step, bytes sent): without compression, then with `name` or, for "auto", each method."""
    elems = held_elems(job, layout, held_by(job, layout, 0))
    plain_bytes = sum(gradients_bytes(job, layout, 0))
    # With ZeRO, all but one reduce-scatter of gradients is the gathering of weights.
    weight_bytes = plain_bytes - _reduce_scatter_bytes(job, layout, elems) if layout.zero else 0.0
    rows = [("none", sum(step_parts(job, layout).values()), plain_bytes)]
    for method in methods_for(layout, job.implementation):
        if name in ("auto", method):
            sent = compressed_gradients(job, layout, elems, method).sent_bytes + weight_bytes
            parts = step_parts(job, layout, partial(_reduction, job, layout, method))
            rows.append((method, sum(parts.values()), sent))
    return rows


def _reduction(job: Job, layout: Layout, method: str, elems: tuple[int, int]) -> Reduction:
    found = compressed_gradients(job, layout, elems, method)
    return Reduction(found.messages_s, found.codec_s, CODECS[method].hides)


def _reduce_scatter_bytes(job: Job, layout: Layout, elems: tuple[int, int]) -> float:
    sizes = [axis_links(job.machine, layout, axis).size for axis in ("dp", "edp")]
    return sum((p - 1) / p * job.bytes_of.gradient * n for p, n in zip(sizes, elems))


def advice(job: Job, layout: Layout, name: str) -> list[str]:
    """Return lines that say whether the method pays on this layout, and the cost of each method."""
    rows = compression_rows(job, layout, name)
    (_, plain_s, _), *others = rows
    if not others:
        if layout.dp * layout.cp == 1:
            return ["", f"compress: no, {layout.name} has one data-parallel rank, which sends no gradients"]
        methods = name if methods_for(layout, job.implementation) else "every method"
        return ["", f"compress: no, {layout.name} cuts or shares what {methods} needs whole on each rank"]
    best = min(others, key=lambda row: row[1])
    if best[1] < PAYS * plain_s:
        verdict = f"compress: yes, {best[0]} takes {plain_s:.3g} s a step to {best[1]:.3g} s, at some loss of quality"
    else:
        verdict = f"compress: no, {best[0]} would take {best[1]:.3g} s a step in place of {plain_s:.3g} s"
    lines = ["", f"{verdict}; on {layout.name}", f"{'s/step':>8} {'GB sent':>8}  method"]
    others.sort(key=lambda row: row[1])
    lines += [
        f"{seconds:8.3f} {num_bytes / 1e9:8.3f}  {method}"
        for method, seconds, num_bytes in (rows[0], *others)
    ]
    return lines
