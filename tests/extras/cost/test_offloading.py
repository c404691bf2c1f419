"""The time of states outside the GPU: the formulas of its docstring, what makes it faster, and what it never changes."""

import json
from dataclasses import replace

import pytest

from minipar.cost.layout import PRECISIONS, Implementation, Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.memory import held_memory, worst_rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.plan_command import Asked
from minipar.cost.ranks import held_by
from minipar.cost.timing import step_parts, step_time
from minipar.extras.cost.offloading import (
    PLACES,
    offload_view,
    offloaded_bytes,
    offloaded_memory,
    offloaded_parts,
)

LAYOUTS = (
    "dp8-zero1-mb2-full",
    "dp4-tp2-zero2-mb2-full",
    "dp8-zero3-mb1",
    "dp4-pp2-zero3-mb1-1f1b-every:2",
    "dp2-cp2-tp2-zero3-mb1",
)
RATES = ("host_link_bytes_per_s", "host_bytes_per_s", "disk_bytes_per_s")


def job_on(machine=MACHINES["a100-80gb"], model="llama-7b", **how) -> Job:
    return Job(MODELS[model], machine, 8, 4096, 64, implementation=Implementation(**how))


def seconds(job: Job, name: str, place: str) -> float:
    return sum(offloaded_parts(job, parse_layout(name), place).values())


@pytest.mark.parametrize("zero", [1, 2])
def test_sharded_states_on_the_cpu_by_hand(zero):
    """7B over 8 ranks: each updates an eighth, gradients go down, weights go down and up; nothing is gathered."""
    job, layout = job_on(), parse_layout(f"dp8-zero{zero}-mb2-full")
    n, b, m = -(-job.shape.num_params // 8), PRECISIONS["mixed"], job.machine
    parts = offloaded_parts(job, layout, "cpu")
    assert parts["update"] == pytest.approx(n * (2 + 2 * 12 + 2) / (0.8 * m.host_bytes_per_s))
    assert parts["offload"] == pytest.approx(n * (2 + 2 + 2) / (0.8 * m.host_link_bytes_per_s))
    background = 2 * n * 12 / (0.8 * m.disk_bytes_per_s) - parts["update"] - parts["offload"]
    on_disk = offloaded_parts(job, layout, "disk")
    assert background > 0
    assert on_disk["offload"] == pytest.approx(parts["offload"] + background)
    assert on_disk["update"] == parts["update"]
    assert (b.weight, b.gradient, b.state) == (2, 2, 12)


def test_zero3_gathers_its_shards_from_the_cpu_by_hand():
    """8 microbatches gather each layer twice; without a pipeline embedding and head are gathered once for each of them."""
    job, layout = job_on(), parse_layout("dp8-zero3-mb1")
    shape, link = job.shape, 0.8 * job.machine.host_link_bytes_per_s
    root = 2 * shape.vocab_size * shape.dim + shape.dim
    gathered = 8 * (2 * (shape.num_params - root) + root) / 8
    moved = offloaded_bytes(job, layout, held_by(job, layout, 0))
    assert moved.gathered == pytest.approx(2 * gathered)
    n = -(-shape.num_params // 8)
    parts = offloaded_parts(job, layout, "cpu")
    assert parts["offload"] == pytest.approx((2 * n + 2 * gathered) / link)
    # Each replica of a hybrid has larger shards.
    hybrid = job_on(replicate=2)
    assert offloaded_bytes(hybrid, layout, held_by(hybrid, layout, 0)).gathered == 2 * moved.gathered


def test_a_file_is_read_ahead_beside_the_arithmetic():
    """ZeRO-3's weights are read while the layer before computes, so a step waits only for what exceeds its arithmetic."""
    layout = parse_layout("dp8-zero3-mb1")
    quick, slow = (job_on(replace(MACHINES["a100-80gb"], disk_bytes_per_s=rate)) for rate in (1e15, 1e8))
    assert offloaded_parts(quick, layout, "disk") == offloaded_parts(quick, layout, "cpu")
    moved = offloaded_bytes(slow, layout, held_by(slow, layout, 0))
    parts, on_cpu = (offloaded_parts(slow, layout, place) for place in ("disk", "cpu"))
    transfers = moved.transferred / (0.8 * slow.machine.host_link_bytes_per_s)
    beside = parts["compute"] + parts["recompute"] + parts["update"] + transfers
    read = (moved.gathered + 2 * moved.stored) / (0.8 * 1e8)
    assert parts["offload"] == pytest.approx(on_cpu["offload"] + read - beside)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rate", RATES)
def test_more_bandwidth_is_never_slower(name, place, rate):
    machine = MACHINES["a100-80gb"]
    found = [
        seconds(job_on(replace(machine, **{rate: times * getattr(machine, rate)})), name, place)
        for times in (0.1, 0.5, 1, 2, 10, 1000)
    ]
    assert all(faster <= (1 + 1e-12) * slower for slower, faster in zip(found, found[1:]))
    if place == "cpu":  # a step that waits for its disk waits no longer for anything beside that
        assert (found[0] > found[-1]) == (rate != "disk_bytes_per_s")
    elif rate == "disk_bytes_per_s":
        assert found[0] > found[-1]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("place", PLACES)
def test_offloading_changes_neither_arithmetic_nor_messages(name, place):
    job, layout = job_on(), parse_layout(name)
    before, after = step_parts(job, layout), offloaded_parts(job, layout, place)
    assert set(after) == {*before, "offload"}
    assert {part: after[part] for part in before if part != "update"} == {
        part: before[part] for part in before if part != "update"
    }
    assert after["offload"] > 0
    assert after["update"] > before["update"]
    assert seconds(job, name, "disk") >= seconds(job, name, "cpu") > step_time(job, layout).total


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_gpu_keeps_no_states(name):
    job, layout = job_on(), parse_layout(name)
    _, items = worst_rank_memory(job, layout)
    outside = items["optimizer state"] + (items["parameters"] if layout.zero == 3 else 0)
    assert outside > 0
    if layout.pp == 1:
        assert offloaded_memory(job, layout) == pytest.approx(sum(items.values()) - outside)
    assert offloaded_memory(job, layout) < sum(items.values())


def test_the_rank_that_moves_most_is_counted():
    """Of two stages, the one that updates more: ranks at the ends hold the embedding and the head, too."""
    job, layout = job_on(model="llama3-8b"), parse_layout("dp2-pp4-zero1-mb1")
    states = [held_memory(job, layout, held_by(job, layout, r))["optimizer state"] for r in range(4)]
    assert min(states) < max(states)
    update = max(states) / 12 * (2 + 24 + 2) / (0.8 * job.machine.host_bytes_per_s)
    assert offloaded_parts(job, layout, "cpu")["update"] == pytest.approx(update)


def test_the_view_shows_each_place_with_its_parts():
    job = job_on()
    answer = offload_view(Asked(job, parse_layout("dp8-zero1-mb2-full")), None)
    assert [line.split()[3] for line in answer.lines[3:]] == ["none", "cpu", "disk"]
    assert "offload" not in answer.lines[3]
    assert all("offload" in line for line in answer.lines[4:])
    entries = json.loads(json.dumps(answer.entries))["offload"]
    assert entries["none"]["seconds"] < entries["cpu"]["seconds"] < entries["disk"]["seconds"]
    assert entries["none"]["gpu_bytes"] > entries["cpu"]["gpu_bytes"]
    assert entries["disk"]["seconds"] == pytest.approx(sum(entries["disk"]["parts"].values()))
    refused = offload_view(Asked(job, parse_layout("dp8-zero0-mb2-full")), None)
    assert "zero=0 shards no states" in refused.lines[1]
    assert refused.entries == {"offload": {}}
