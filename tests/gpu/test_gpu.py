"""Equivalence, collectives, traffic, memory and faults by backend: NCCL where it can serve so many ranks, else skipped.

With gloo the same functions run on two ranks, so that a machine without a GPU knows that they work.
"""

from dataclasses import replace

import pytest
import torch

import minipar
from minipar.runtime.devices import Machine
from minipar.support.errors import RankError
from minipar.train.data.text import load_data
from minipar.train.verification.verify import table, verify
from tests.comm.cases import NAMES, case
from tests.comm.sent import FORMULAS, messages
from tests.gpu import bodies
from tests.gpu.layouts import layouts, worlds

DTYPES = ("float64", "float32", "bfloat16")
COLLECTIVE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
WORLDS = worlds(Machine.here()) or [2]  # a machine without GPUs skips two ranks, and says why


def on_nccl(ranks, *values):
    return pytest.param(
        "nccl", ranks, *values, marks=pytest.mark.nccl(ranks), id="-".join(map(str, ("nccl", ranks, *values)))
    )


def backends(ranks=WORLDS):
    """(backend, ranks): gloo on two, nccl on each of these numbers, but for one rank, which sends nothing."""
    nccl = [on_nccl(n) for n in ranks if n > 1]
    return pytest.mark.parametrize(
        ("backend", "ranks"), [pytest.param("gloo", 2, id="gloo-2", marks=pytest.mark.thorough), *nccl]
    )


def verified():
    """(backend, ranks, strategy, dtype): with gloo two, since the others are other tests' business there."""
    found = [pytest.param("gloo", 2, name, dtype) for name, dtype in (("DDP", "float64"), ("TP", "bfloat16"))]
    return found + [on_nccl(n, name, dtype) for n in WORLDS for name in layouts(n) for dtype in DTYPES]


def stepped():
    return [pytest.param("gloo", 2, "DDP"), *(on_nccl(n, name) for n in WORLDS for name in layouts(n))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("backend", "ranks", "name", "dtype"), verified())
def test_every_strategy_gives_the_numbers_of_one_process(backend, ranks, name, dtype, record_property):
    config = replace(layouts(ranks)[name], dtype=dtype, timeout_s=30)
    result = verify(config, backend=backend)
    record_property("verified", [backend, name, ranks, dtype, result.difference])
    assert result.equal, table(result)


@backends()
def test_collectives_are_right_and_send_as_their_docstrings_say(backend, ranks):
    drawn = [
        case(*name, (rows, 2), dtype, root=ranks - 1)
        for name in NAMES
        for dtype in COLLECTIVE_DTYPES
        for rows in (0, 1, 5 * ranks + 1)
    ]
    by_rank = minipar.run(bodies.collectives, drawn, world_size=ranks, backend=backend, timeout_s=60)
    for rank, said in enumerate(by_rank):
        for one, (words, sent_bytes) in zip(drawn, said):
            assert not words, (one, words)
            if (one.collective, one.algorithm) in FORMULAS:
                assert sent_bytes == sum(messages(one, rank, ranks)), (rank, one)


@pytest.mark.parametrize(("backend", "ranks", "name"), stepped())
def test_a_timed_step_makes_the_host_wait_at_most_once(backend, ranks, name, record_property):
    config = replace(layouts(ranks)[name], steps=5)
    text = load_data(config)[0]
    by_rank = minipar.run(bodies.steps, config, text, world_size=ranks, backend=backend, timeout_s=60)
    record_property("stepped", [backend, name, ranks, by_rank])
    for seen in by_rank:
        assert seen["peak_bytes"] > 0
        if seen["host_waits"] is not None and not config.model.num_experts:
            # One for the loss and the norm: what is copied to the GPU, such as the batch, lies in pinned memory.
            assert seen["host_waits"] <= 1


@backends()
def test_the_more_zero_shards_the_less_a_rank_holds(backend, ranks):
    config = layouts(ranks)["DDP"]
    text, held = load_data(config)[0], []
    for zero in (0, 1, 3):
        options = dict(world_size=ranks, backend=backend, timeout_s=60)
        held.append(max(n for n, _ in minipar.run(bodies.held, replace(config, zero=zero), text, **options)))
    assert held[0] > held[1] > held[2]


FAULTS = {
    bodies.skips_an_all_reduce: "late: .*all_reduce",
    bodies.raises: "rank 1 has had enough",
    bodies.is_killed: "killed by SIGKILL",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@backends()
def test_a_fault_is_explained_in_time_and_the_next_run_works(backend, ranks, fault):
    timeout_s = 2 if backend == "gloo" else 20
    with pytest.raises(RankError, match=FAULTS[fault]) as failed:
        minipar.run(fault, world_size=ranks, backend=backend, timeout_s=timeout_s)
    assert failed.value.rank == 1
    assert minipar.run(bodies.all_is_well, world_size=ranks, backend=backend) == [[ranks] * 4] * ranks


@backends([2])
def test_a_tensor_of_another_device_is_refused(backend, ranks):
    with pytest.raises(RankError, match=r"is on (cpu|meta), and comm 'world' on (cuda:0|cpu)"):
        minipar.run(bodies.brings_a_tensor_of_another_device, world_size=ranks, backend=backend)
