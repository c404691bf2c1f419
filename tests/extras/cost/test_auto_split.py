"""The automatic split against every split there is, and what it prints."""

from dataclasses import replace
from itertools import product

import pytest

from minipar.cost.layout import Job
from minipar.cost.machines import MACHINES
from minipar.cost.models import ModelShape
from minipar.extras.cost.auto_split import (
    auto_split,
    best_stage,
    cuts,
    message_s,
    microbatch_sizes,
    split_text,
    submeshes,
)

TINY = ModelShape("tiny", 5, 1024, 8, 2816, 32000, 4)
H100 = MACHINES["h100"]
JOBS = [
    Job(TINY, replace(H100, gpus_per_node=2), 4, 512, 8),
    Job(TINY, replace(H100, memory_bytes=3.0e9, gpus_per_node=2, card_bytes_per_s=1e9), 4, 512, 8),
    Job(replace(TINY, vocab_size=256000), replace(H100, memory_bytes=8e9, gpus_per_node=4), 8, 256, 4),
    Job(replace(TINY, num_experts=4, top_k=2, moe_every=2), replace(H100, memory_bytes=4e9), 4, 512, 8),
    Job(TINY, replace(H100, memory_bytes=2.2e9), 2, 512, 8),
]


def compositions(total: int, parts: int, sizes):
    """Every sequence of `parts` sizes with this sum."""
    return [found for found in product(sizes, repeat=parts) if sum(found) == total]


def brute_force(job: Job) -> float | None:
    """Seconds of the fastest of all cuts of the layers, all meshes of the stages, all sizes of a microbatch."""
    best, layers = None, job.shape.num_layers
    for samples in microbatch_sizes(job):
        m = job.batch // samples
        for count in range(1, layers + 1):
            for lengths in compositions(layers, count, range(1, layers + 1)):
                for meshes in compositions(job.gpus, count, submeshes(job)):
                    start, stages = 0, []
                    for i, (length, gpus) in enumerate(zip(lengths, meshes)):
                        stages.append(
                            best_stage(job, samples, start, start + length, gpus, min(count - i, m))
                        )
                        start += length
                    if None in stages:
                        continue
                    sent = sum(message_s(job, samples, stage.layout) for stage in stages[:-1])
                    times = [stage.seconds for stage in stages]
                    seconds = sum(times) + sent + (m - 1) * max(times)
                    best = seconds if best is None else min(best, seconds)
    return best


@pytest.mark.parametrize(
    "job", JOBS, ids=lambda job: f"{job.gpus} GPUs of {job.machine.memory_bytes / 1e9} GB"
)
def test_the_split_is_that_of_brute_force(job):
    want, found = brute_force(job), auto_split(job)
    if want is None:
        assert found is None
        return
    assert found.seconds == pytest.approx(want, rel=1e-12)
    assert sum(stage.gpus for stage in found.stages) == job.gpus
    assert [stage.first for stage in found.stages] == [
        sum(stage.num_layers for stage in found.stages[:i]) for i in range(len(found.stages))
    ]
    assert all(stage.num_bytes <= job.machine.memory_bytes for stage in found.stages)


def test_a_large_head_gets_more_gpus_or_fewer_layers():
    """A head as large as many layers: on the last stage fewer layers share its GPUs."""
    small = replace(H100, memory_bytes=9e9, gpus_per_node=2, card_bytes_per_s=1e8)
    job = Job(replace(TINY, num_layers=8, vocab_size=512000), small, 4, 512, 16)
    stages = auto_split(job).stages
    assert len(stages) > 1
    assert stages[-1].num_layers / stages[-1].gpus < stages[0].num_layers / stages[0].gpus


def test_meshes_and_cuts():
    job = Job(replace(TINY, num_layers=80), H100, 32, 512, 8)
    assert submeshes(job) == [1, 2, 4, 8, 16, 24, 32]
    assert cuts(job, 16) == list(range(0, 81, 5))
    assert cuts(JOBS[0], 16) == [0, 1, 2, 3, 4, 5]


def test_the_table_has_every_stage():
    job = JOBS[2]
    found = auto_split(job)
    text = split_text(job, found, 1.0)
    assert len([line for line in text.splitlines() if "zero" in line]) == len(found.stages)
    assert "1.000 s" in text
