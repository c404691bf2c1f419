"""Write docs/generated/tuning.md, a run tuned step by step: four real ranks, whose layers, link and disk sleep instead.

    python -m benchmarks.guide.tuning benchmarks/guide/measured.toml    # measures again; use an idle machine

The page's figures are in measured.toml, and its words in tuning.toml. `expected_s` computes the time of a step from the
times that are slept.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from minipar.learn.facts import quote
from minipar.support.trace import DATA, Span, Trace, busy_s, find_data_wait, overlap_fraction

RANKS, LAYERS, SAMPLES = 4, 4, 4  # SAMPLES is per rank and step
# A layer's forward takes FIXED_S + SAMPLE_S * samples; its backward takes twice that.
FIXED_S, SAMPLE_S = 0.008, 0.004
LINK_S = 0.04  # time to send one layer's gradients
READ_S, SLOW_READ_S, SLOW_RANK = 0.05, 0.45, 2
STEPS, WARM_UP, REPEATS = 6, 2, 3


@dataclass(frozen=True)
class Setting:
    """The settings of a run.

    microbatches      number of microbatches into which a rank's samples are divided
    each_microbatch   True: gradients are reduced after each microbatch; False: once a step
    whole             True: one bucket for all layers, which is complete only after the backward; False: one per layer
    slow_reader       True: SLOW_RANK reads from a slow disk
    """

    microbatches: int = 4
    each_microbatch: bool = True
    whole: bool = True
    slow_reader: bool = True

    def computing_s(self) -> float:
        """Return the time of arithmetic in a step, in seconds."""
        layer = FIXED_S + SAMPLE_S * SAMPLES / self.microbatches
        return self.microbatches * LAYERS * 3 * layer

    def exposed_s(self) -> float:
        """Return the time, in seconds, for which a rank waits for gradients in a step.

        With one bucket per layer, only the last bucket is exposed: the others overlap with the backward, in which a layer
        takes longer than a bucket.
        """
        times = self.microbatches if self.each_microbatch else 1
        return times * LINK_S * (LAYERS if self.whole else 1)

    def expected_s(self) -> float:
        """Return the time of a step, in seconds: that of arithmetic and exposed messages, or of the slowest reader."""
        return max(self.computing_s() + self.exposed_s(), SLOW_READ_S if self.slow_reader else READ_S)


SETTINGS = {  # each differs from the previous one in one setting
    "start": Setting(),
    "once": Setting(each_microbatch=False),
    "larger": Setting(1, each_microbatch=False),
    "buckets": Setting(1, each_microbatch=False, whole=False),
    "reader": Setting(1, each_microbatch=False, whole=False, slow_reader=False),
}


def measure(setting: Setting) -> dict[str, float]:
    """Run the setting on real ranks; return the figures of its trace."""
    from minipar.runtime.launch import run

    return figures(dict(enumerate(run(_spans, setting, world_size=RANKS))))


def figures(spans_by_rank: Mapping[int, list[Span]]) -> dict[str, float]:
    """Return a trace's figures: means over ranks, and for the wait for data, the rank that waits most.

    step_s       time from the start of the first span to the end of the last, per step
    messages_s   time of collectives, per step
    exposed_s    time of collectives that does not overlap with arithmetic, per step
    hidden       fraction of the time of collectives that overlaps with arithmetic
    data_wait    fraction of the time in which rank `data_rank` waits for a batch
    """
    every = [span for spans in spans_by_rank.values() for span in spans]
    length_s = max(span.end_s for span in every) - min(span.start_s for span in every)
    mean: Callable[[Any], float] = statistics.fmean
    waited = find_data_wait(dict(spans_by_rank))
    messages = {rank: busy_s(spans, "communicate") for rank, spans in spans_by_rank.items()}
    hidden = {rank: overlap_fraction(spans) for rank, spans in spans_by_rank.items()}
    return {
        "step_s": length_s / STEPS,
        "messages_s": mean(messages.values()) / STEPS,
        "exposed_s": mean(messages[rank] * (1 - hidden[rank]) for rank in messages) / STEPS,
        "hidden": mean(hidden.values()),
        "data_wait": waited.fraction if waited else 0.0,
        "data_rank": float(waited.rank if waited else -1),
    }


def _spans(world: Any, setting: Setting) -> list[Span]:
    """Run STEPS steps after the warm-up on one rank; return their spans."""
    import torch

    from minipar.comm.transport.stream import Pending
    from minipar.data_parallel import DDP
    from minipar.data_parallel.reductions import BucketReduction
    from minipar.pipeline.emulate import EmulatedStage
    from minipar.train.data.prefetch import prefetch_batches

    def sleeping_link(bucket: BucketReduction) -> Pending:
        """Reduce a bucket on a slow link, simulated: sleep LINK_S for each layer's gradients."""

        def reduce() -> None:
            time.sleep(LINK_S * len(bucket.layout))
            bucket.comm.all_reduce_(bucket.flat, bucket.op)

        handle: Pending = bucket.comm.custom("slow_all_reduce", reduce, async_op=True)
        return handle

    forward_s = FIXED_S + SAMPLE_S * SAMPLES / setting.microbatches
    layers = torch.nn.Sequential(*(EmulatedStage(forward_s, 2 * forward_s, 0) for _ in range(LAYERS)))
    ddp = DDP(layers, world, bucket_mb=25.0 if setting.whole else 1e-6, reduce_bucket=sleeping_link)
    read_s = SLOW_READ_S if setting.slow_reader and world.rank == SLOW_RANK else READ_S
    trace = Trace()
    world.trace = trace
    with closing(prefetch_batches(lambda step: time.sleep(read_s), range(STEPS + WARM_UP))) as batches:
        for step in range(STEPS + WARM_UP):
            if step == WARM_UP:
                world.barrier()
                trace.spans.clear()
            with trace.span("wait", DATA):
                next(batches)
            for microbatch in range(setting.microbatches):
                reduces = setting.each_microbatch or microbatch == setting.microbatches - 1
                with nullcontext() if reduces else ddp.no_sync():
                    with trace.span("compute", "forward"):
                        loss = ddp(torch.ones(1, requires_grad=True)).sum()
                    with trace.span("compute", "backward"):
                        loss.backward()
    world.trace = None
    return trace.spans


def measured_text(machine: str, seen: Mapping[str, Mapping[str, float]]) -> str:
    """Return the text of measured.toml."""
    lines = [f'machine = "{machine}"']
    for name, values in seen.items():
        lines += ["", f"[{name}]", *(f"{key} = {value:.4f}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


# The page --------------------------------------------------------------------------------------------------------------


def _toml(name: str) -> dict[str, Any]:
    return quote(tomllib.loads((files("benchmarks.guide") / name).read_text(encoding="utf-8")))


def page() -> str:
    """Return the text of docs/generated/tuning.md."""
    words, seen = _toml("tuning.toml"), _toml("measured.toml")
    machine, first = seen.pop("machine"), seen["start"]["step_s"]
    lines = [
        "# A run, tuned step by step",
        "",
        words["before"].format(machine=machine, repeats=REPEATS, **_constants()),
        "",
        "| run | s a step | on paper | messages | of them exposed | hidden | a rank waits for data |",
        "|---|---|---|---|---|---|---|",
    ]
    for step in words["step"]:
        s, setting = seen[step["name"]], SETTINGS[step["name"]]
        lines.append(
            f"| {step['title']} | {s['step_s']:.2f} | {setting.expected_s():.2f} | {s['messages_s']:.2f} s | "
            f"{s['exposed_s']:.2f} s | {s['hidden']:.0%} | {s['data_wait']:.0%} |"
        )
    before: dict[str, float] = {}
    for number, step in enumerate(words["step"]):
        now = seen[step["name"]]
        known = dict(now=now, before=before, share=now["messages_s"] / now["step_s"], **_constants())
        said = f"**{number}. {step['title']}.** {step['text'].format(**known)}"
        if before:
            ratio = before["step_s"] / now["step_s"]
            said += f" *Brought*: {before['step_s']:.2f} to {now['step_s']:.2f} s, {ratio:.2f} times."
        lines += ["", said, "", "```", step["command"], "```"]
        before = now
    lines += ["", words["after"].format(now=before, gain=first / before["step_s"], **_constants())]
    lines += ["", "Written by `python -m benchmarks.guide docs/generated`."]
    return "\n".join(lines) + "\n"


def _constants() -> dict[str, float]:
    return dict(
        ranks=RANKS, layers=LAYERS, samples=SAMPLES, fixed_ms=1e3 * FIXED_S, sample_ms=1e3 * SAMPLE_S, link_ms=1e3 * LINK_S,
        read_s=READ_S, slow_s=SLOW_READ_S, slow_rank=SLOW_RANK,
    )  # fmt: skip


def main(path: Path) -> None:
    """Measure every setting REPEATS times, and write the medians."""
    seen = {}
    for name, setting in SETTINGS.items():
        runs = [measure(setting) for _ in range(REPEATS)]
        seen[name] = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        print(name, f"{seen[name]['step_s']:.3f} s, on paper {setting.expected_s():.3f} s", flush=True)
    path.write_text(
        measured_text(f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}", seen),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
