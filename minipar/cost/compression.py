"""Bytes, passes and seconds of compressed gradients: when it pays to send less.

    seconds = messages / bandwidth, of fewer bytes      + passes * 4 bytes * gradients / memory bandwidth

Encoding runs on the GPU that the backward runs on, so nothing hides it; the messages of a compressed gradient hide behind
the backward as those of a whole one do; a momentum is sent after it. So over a 10 Gb/s link almost any codec pays, and
over NVLink none. Passes are counted in minipar's own code; a fused kernel takes fewer. Loss is not predicted: lesson 14
measures it.
"""

from __future__ import annotations

from typing import NamedTuple

from minipar.cost.layout import Job, Layout
from minipar.cost.links import axis_links, collective_s
from minipar.cost.ranks import held_by, held_elems
from minipar.cost.traffic import gradients_bytes
from minipar.errors import one_of

SCALE_BYTES = 4 / 256  # an element's share of its block's scale
EVERY, RANK, FRACTION = 10, 4, 0.01  # `minipar train`'s defaults


class Codec(NamedTuple):
    """The bytes that a method sends, and how often it reads or writes each element.

    sent_bytes  of an element, in each of the two phases; None: powersgd's, which depend on the width
    passes      over a float32 of each element
    phases      the collectives
    share       of the steps that send anything
    hides       whether the messages hide behind the backward
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
    "local-sgd": Codec(4.0, 4, ("all_reduce",), 1 / EVERY, hides=False),
    "diloco": Codec(4.0, 8, ("all_reduce",), 1 / EVERY, hides=False),
}
CUTS_NOTHING = (
    "onebit-adam",
    "onebit-lamb",
    "zero-one-adam",
    "local-sgd",
    "diloco",
)  # need the whole state: zero=0


class Compressed(NamedTuple):
    """Seconds of a step: of messages, which may hide, and of encoding; and the bytes that a rank sends."""

    messages_s: float
    codec_s: float
    sent_bytes: float


def methods_for(layout: Layout) -> list[str]:
    """Return the methods that this layout can use: none that cuts gradients, and most of them cut nothing."""
    if layout.zero > 1 or layout.dp * layout.cp == 1:
        return []
    alone = ("zero-one-adam", "local-sgd", "diloco") if layout.cp > 1 or layout.ep > 1 else ()
    whole = ("onebit-lamb",) if layout.tp > 1 or layout.ep > 1 else ()
    refused = (*alone, *whole, *(CUTS_NOTHING if layout.zero else ()))
    return [name for name in CODECS if name not in refused]


def compressed_gradients(job: Job, layout: Layout, elems: tuple[int, int], name: str) -> Compressed:
    """Return what `name` costs a rank that holds (dense, expert) elements; in the mean step, after any warm-up."""
    machine, codec = job.machine, CODECS[name]
    messages = codec_s = sent = 0.0
    for axis, number in zip(("dp", "edp"), elems):
        links = axis_links(machine, layout, axis)
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
    """Bytes of an element. Two factors of a D x D/tp matrix have r (D + D/tp) elements of D^2/tp."""
    if codec.sent_bytes is not None:
        return codec.sent_bytes
    return min(4.0, 4 * RANK * (1 + layout.tp) / job.shape.dim)


def _elements(job: Job, name: str, number: int) -> tuple[float, float]:
    """(compressed, sent whole): tagc takes the feed-forward layers alone."""
    if name != "tagc":
        return number, 0.0
    shape = job.shape
    feed_forward = 3 * shape.dim * shape.hidden_dim
    attention = 2 * shape.dim * (shape.dim + shape.num_kv_heads * shape.head_dim)
    share = feed_forward / (feed_forward + attention)
    return share * number, (1 - share) * number


# The answer of `minipar plan --compress` -------------------------------------------------------------------------------


PAYS = 0.98  # of a step's seconds: less is within the model's error


def check_method(name: str) -> None:
    """Raise ValueError, with the nearest name, where `minipar plan --compress` has no such method."""
    if name not in ("none", "auto", *CODECS):
        raise ValueError(f"compress={name!r} is unknown; use {one_of(('none', 'auto', *CODECS), near=name)}")


def compression_rows(job: Job, layout: Layout, name: str) -> list[tuple[str, float, float]]:
    """Return (method, seconds of a step, bytes of gradients) without compression, then of `name`, or of all if "auto"."""
    from minipar.cost.timing import step_parts  # which imports this module

    elems = held_elems(job, layout, held_by(job, layout, 0))
    plain_bytes = sum(gradients_bytes(job, layout, 0))
    weight_bytes = plain_bytes * job.bytes_of.weight / (job.bytes_of.gradient + job.bytes_of.weight)
    rows = [("none", sum(step_parts(job, layout).values()), plain_bytes)]
    for method in methods_for(layout):
        if name in ("auto", method):
            sent = compressed_gradients(job, layout, elems, method).sent_bytes + weight_bytes * layout.zero
            rows.append((method, sum(step_parts(job, layout, method).values()), sent))
    return rows


def faster_layout(job: Job, winner: Layout, others: list[Layout], name: str) -> list[str]:
    """Return a line that names the fastest of the other layouts with compression, where it beats the winner with any."""
    own_s = min(seconds for _, seconds, _ in compression_rows(job, winner, name))
    found = [
        (seconds, layout.name, method)
        for layout in others
        for method, seconds, _ in compression_rows(job, layout, name)[1:]
    ]
    seconds, layout, method = min(found, default=(own_s, "", ""))
    return [f"with {method}, {layout} would take {seconds:.3g} s a step"] if seconds < PAYS * own_s else []


def advice(job: Job, layout: Layout, name: str) -> list[str]:
    """Return the lines of `minipar plan --compress name`: whether it pays on this layout, and what each method costs."""
    (_, plain_s, plain_bytes), *others = compression_rows(job, layout, name)
    if not others:
        if layout.dp * layout.cp == 1:
            return ["", f"compress: no, {layout.name} has one data-parallel rank, which sends no gradients"]
        methods = name if methods_for(layout) else "every method"
        return ["", f"compress: no, {layout.name} cuts or shares what {methods} needs whole on each rank"]
    best = min(others, key=lambda row: row[1])
    if best[1] < PAYS * plain_s:
        verdict = f"compress: yes, {best[0]} takes {plain_s:.3g} s a step to {best[1]:.3g} s, at some loss of quality"
    else:
        verdict = f"compress: no, {best[0]} would take {best[1]:.3g} s a step in place of {plain_s:.3g} s"
    lines = ["", f"{verdict}; on {layout.name}", f"{'s/step':>8} {'GB sent':>8}  method"]
    rows = [("none", plain_s, plain_bytes), *sorted(others, key=lambda row: row[1])]
    return lines + [f"{seconds:8.3f} {num_bytes / 1e9:8.3f}  {method}" for method, seconds, num_bytes in rows]
