"""What a rank does in the tests on GPUs. Tensors are made on the CPU and moved to the world's device."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from unittest import mock

import torch

from minipar.comm import reduction
from minipar.comm.transport.cuda_trace import trace_on
from minipar.mesh import Mesh
from minipar.spec.collectives import wrong
from minipar.support.live_bytes import counted_bytes
from minipar.support.trace import overlap_fraction
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step
from tests.comm.cases import implementation


def collectives(world, cases):
    """Of each case: what is wrong with its result, and the bytes that this rank has sent."""
    said = []
    for case in cases:
        world.traffic.reset()
        with mock.patch.object(reduction, "SEGMENT_BYTES", case.segment_bytes):
            words = wrong(world, _on_device(implementation(case)), case)
        said.append((words, world.traffic.sent_bytes))
    return said


def _on_device(function):
    def run(comm, x, *arguments):
        result = function(comm, x.to(comm.device), *arguments)
        return None if result is None else result.cpu()

    return run


def steps(world, config, text):
    """Seconds of a step, the peak of its memory, how much communication it hides, and what it makes the host wait for."""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    train_step(world, state, config, text, 0)
    with counted_bytes(world.device) as memory:
        train_step(world, state, config, text, 1)
    world.barrier()
    start_s = time.perf_counter()
    train_step(world, state, config, text, 2)
    seconds = time.perf_counter() - start_s
    world.trace = trace = trace_on(world.device)
    train_step(world, state, config, text, 3)
    world.trace = None
    return {
        "seconds": seconds,
        "peak_bytes": memory.peak,
        "hidden": overlap_fraction(trace.spans),
        "host_waits": _host_waits(world, state, config, text),
    }


def _host_waits(world, state, config, text) -> int | None:
    """How often torch says that a step waits for the GPU; None on a CPU."""
    if world.device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(world, state, config, text, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def held(world, config, text):
    """The bytes that a rank holds between two steps."""
    with counted_bytes(world.device) as memory:
        state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
        train_step(world, state, config, text, 0)
        state.optimizer.zero_grad()
        world.barrier()
        gc.collect()
        now = memory.now
    return now, state is None


# Faults -------------------------------------------------------------------------------------------------------------


def skips_an_all_reduce(world):
    """Rank 1 computes instead."""
    x = torch.ones(1000, device=world.device)
    world.all_reduce(x)
    if world.rank == 1:
        time.sleep(60)
    return world.all_reduce(x).sum().item()


def raises(world):
    if world.rank == 1:
        raise ArithmeticError("rank 1 has had enough")
    return world.all_reduce(torch.ones(1000, device=world.device)).sum().item()


def is_killed(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return world.all_reduce(torch.ones(1000, device=world.device)).sum().item()


def brings_a_tensor_of_another_device(world):
    other = "cpu" if world.device.type == "cuda" else "meta"
    return world.all_reduce(torch.ones(4, device=other))


def all_is_well(world):
    return world.all_reduce(torch.ones(4, device=world.device)).tolist()
