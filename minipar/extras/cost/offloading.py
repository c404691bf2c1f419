"""The time and memory of a step whose optimizer states are outside the GPU: `minipar train --offload cpu` and `disk`.

A rank updates n of the parameters, of w, g and k bytes of weights, gradients and optimizer state. Once a step, after the
backward and the reduction of gradients:

    update       n (g + 2 k + w) / bandwidth of the CPU's memory        the optimizer runs on the CPU
    transfers    n (g + w) / bandwidth between GPU and CPU              gradients down, new weights up
                 n w more with ZeRO-1 and -2: the weights go down, too, to find those changed since the last step
    disk         n k read and n k written / bandwidth of the disk       in the background, while other chunks are updated

With ZeRO-3 the shards of the weights are outside, too. New weights need not go up after the update; each gather brings this
rank's shard up, from CPU memory or from the file. A file is read ahead, while the layer before computes:

    gathers      bytes of this rank's shards in all gathers of a step / bandwidth between GPU and CPU
    read ahead   the same bytes / bandwidth of the disk

Chunks are updated one after another: a transfer hides neither behind the backward nor behind another chunk's update. Only
the disk works in the background, so a step waits for what exceeds the work beside it:

    offload = transfers + gathers + max(0, 2 n k / disk - update - transfers) + max(0, read ahead - arithmetic)

FLOPs and messages between ranks stay the same. The GPU keeps no optimizer state, and with ZeRO-3 none of the weights but
the gathered ones. As on all links, `machine.share` of the bandwidths is reached. No published run was compared.

Source: ZeRO-Offload, arXiv:2101.06840, section 4; ZeRO-Infinity, arXiv:2104.07857, sections 4 and 5.
"""

from __future__ import annotations

from typing import NamedTuple

from minipar.config.rules import expert_ranks
from minipar.cost.layout import Job, Layout
from minipar.cost.memory import held_memory, worst_rank_memory
from minipar.cost.plan_command import Answer, Asked
from minipar.cost.ranks import RankContents, held_elems, rank_kinds, unsharded_elems
from minipar.cost.report import GB, shares
from minipar.cost.timing import step_parts
from minipar.cost.traffic import gathers, root_gathers

PLACES = ("cpu", "disk")


class OffloadedBytes(NamedTuple):
    """The bytes that a rank moves in a step because states are outside the GPU.

    updated       read and written in the CPU's memory by the update
    transferred   between GPU and CPU for the update
    gathered      of this rank's shards of weights, brought to the GPU for ZeRO-3's gathers
    stored        of optimizer state outside the GPU, read and written once
    """

    updated: float
    transferred: float
    gathered: float
    stored: float


def why_not_offloaded(layout: Layout) -> str | None:
    """Return why the states cannot be outside the GPU; None if they can."""
    return "zero=0 shards no states; use zero1, zero2 or zero3" if layout.zero == 0 else None


def offloaded_bytes(job: Job, layout: Layout, held: RankContents) -> OffloadedBytes:
    """Return what a rank with contents `held` moves in a step. The same for "cpu" and "disk"."""
    b = job.bytes_of
    stored = held_memory(job, layout, held)["optimizer state"]
    number = stored / b.state
    crossings = 0 if layout.zero == 3 else 2  # of the weights: down and up
    return OffloadedBytes(
        number * (b.gradient + 2 * b.state + b.weight),
        number * (b.gradient + crossings * b.weight),
        b.weight * _gathered_elems(job, layout, held) if layout.zero == 3 else 0.0,
        stored,
    )


def _gathered_elems(job: Job, layout: Layout, held: RankContents) -> float:
    """Return the elements of this rank's shards, counted once for each gather of a step."""
    dense, expert = held_elems(job, layout, held)
    roots = root_gathers(job, layout, held)
    copies, sharers = job.implementation.replicate, layout.dp * layout.cp
    experts = expert_ranks(layout.dp, layout.cp, layout.tp, job.implementation.fold_experts) // layout.ep
    layers = dense - unsharded_elems(job, layout, held) - sum(elems for elems, _ in roots)
    times = layout.microbatches(job) * layout.slices * gathers(layout)
    ends = sum(elems * number for elems, number in roots)
    return copies * ((times * layers + ends) / sharers + times * expert / experts)


def offloaded_parts(job: Job, layout: Layout, place: str) -> dict[str, float]:
    """Return the time of each part of a step, with "update" on the CPU and a part "offload" more.

    place  "cpu" or "disk". The pipeline rank that moves most is counted, since all ranks wait for it.
    """
    parts = step_parts(job, layout)
    arithmetic_s = parts["compute"] + parts["recompute"]
    kinds = rank_kinds(job, layout.schedule, layout.pp, layout.chunks)
    times = [offload_seconds(job, offloaded_bytes(job, layout, held), place, arithmetic_s) for held in kinds]
    parts["update"], parts["offload"] = max(times, key=sum)
    return parts


def offload_seconds(job: Job, moved: OffloadedBytes, place: str, arithmetic_s: float) -> tuple[float, float]:
    """Return (update on the CPU, time of moving bytes that the step waits for).

    arithmetic_s  the step's arithmetic, beside which a file is read for ZeRO-3's gathers
    """
    m = job.machine
    update_s = moved.updated / (m.share * m.host_bytes_per_s)
    link = m.share * m.host_link_bytes_per_s
    transfers_s, gathers_s = moved.transferred / link, moved.gathered / link
    waited_s = 0.0
    if place == "disk":
        disk = m.share * m.disk_bytes_per_s
        waited_s += max(0.0, 2 * moved.stored / disk - update_s - transfers_s)
        waited_s += max(0.0, moved.gathered / disk - arithmetic_s)
    return update_s, transfers_s + gathers_s + waited_s


def offloaded_memory(job: Job, layout: Layout) -> float:
    """Return the bytes on the fullest GPU. A file's two buffers are in the CPU's memory."""
    outside = ("optimizer state", "parameters") if layout.zero == 3 else ("optimizer state",)
    found = (
        held_memory(job, layout, held) for held in rank_kinds(job, layout.schedule, layout.pp, layout.chunks)
    )
    return max(sum(size for name, size in items.items() if name not in outside) for items in found)


# The answer of `minipar plan --view offload` -----------------------------------------------------------------------------


def offload_view(asked: Asked, options: None) -> Answer:
    """Return the time and memory of the layout with states on the GPU, in CPU memory, and in a file."""
    job, layout = asked.job, asked.layout
    assert layout is not None
    if why := why_not_offloaded(layout):
        return Answer(["", f"offload: no, {layout.name} has {why}"], {"offload": {}})
    _, on_gpu = worst_rank_memory(job, layout)
    rows = {"none": (step_parts(job, layout), sum(on_gpu.values()))}
    rows |= {place: (offloaded_parts(job, layout, place), offloaded_memory(job, layout)) for place in PLACES}
    lines = [
        "",
        f"offload of {layout.name}",
        f"{'s/step':>8} {'GB':>6} {'fits':>4}  states, and where time goes",
    ]
    for place, (parts, num_bytes) in rows.items():
        fits = "yes" if num_bytes <= job.room_bytes else "no"
        lines.append(
            f"{sum(parts.values()):8.3f} {num_bytes / GB:6.1f} {fits:>4}  {place}  ({shares(parts)})"
        )
    entries = {
        place: {"seconds": sum(parts.values()), "parts": parts, "gpu_bytes": num_bytes}
        for place, (parts, num_bytes) in rows.items()
    }
    return Answer(lines, {"offload": entries})
