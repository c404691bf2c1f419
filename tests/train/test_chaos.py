"""Runs that something ends at a drawn moment, and that go on, maybe on another mesh, to the losses of a run never ended.

What is killed is a rank, the fork server, or the caller; a rank is stopped for ever; a disk is full. Nothing may be left
of a run that has ended: no process, no temporary file. `make test-all` draws a few cases, always the same; `make soak`
draws others, for half its time.
"""

import json
import os
import pickle
import random
import re
import secrets
import shutil
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.data_parallel import DDP
from minipar.train.data.text import load_data
from minipar.train.reference import relative, train_in_one_process
from tests.programs import Program

STEPS = 8
BASE = TrainConfig(
    model=ModelConfig(dim=16, num_layers=2, num_heads=2, max_seq_len=32, dropout=0.1),
    batch_size=4, seq_len=32, steps=STEPS, warmup=2, dtype="float64", verify_steps=0, trace_steps=0,
    checkpoint_every=2, timeout_s=60,
)  # fmt: skip
MESHES = (
    dict(),
    dict(dp=2),
    dict(dp=2, zero=1),
    dict(dp=2, zero=3),
    dict(dp=4, zero=2),
    dict(tp=2, sequence_parallel=True),
    dict(cp=2),
    dict(pp=2, microbatches=2),
    dict(pp=2, dp=2, microbatches=2, zero=1, schedule="zb-h1"),
    dict(dp=2, tp=2, zero=1, offload="disk"),
)

# What ends a run -> how it exits, and the words in which it tells the cause.
FAULTS = {
    "rank killed": (1, r"rank {rank} failed:\nits process was killed by SIGKILL"),
    "rank stopped": (1, r"rank {rank}.*(stopped|SIGSTOP)"),
    "server killed": (1, "ended with the fork server, which something has killed"),
    "disk full": (1, "File too large"),
    "caller killed": (-9, ""),
    "caller interrupted": (-2, ""),
}

PROGRAM = """
import os, pickle, resource, signal
from minipar.runtime import launch
from minipar.train import train

config, fault, step, rank = pickle.load(open("case", "rb"))

def strike(what, metrics):
    if what == "train" and metrics["step"] == step:
        pids = launch._pools["gloo"].pids
        if fault == "rank killed":
            os.kill(pids[rank], signal.SIGKILL)
        if fault == "rank stopped":
            os.kill(pids[rank], signal.SIGSTOP)
        if fault == "server killed":
            os.kill(launch._servers[0]._process.pid, signal.SIGKILL)
        if fault == "disk full":
            for pid in pids:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 10, 1 << 10))
        if fault == "caller killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "caller interrupted":
            os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    train(config, strike)
"""


class Case(NamedTuple):
    there: TrainConfig  # the run that is ended
    here: TrainConfig  # the run that goes on
    fault: str
    step: int
    rank: int


def drawn_case(draw: random.Random, fault: str) -> Case:
    there, here = (replace(BASE, **draw.choice(MESHES)) for _ in range(2))
    if draw.random() < 0.4:
        here = there
    if fault == "rank stopped" and there.world_size == 1:  # nobody would wait for it
        return drawn_case(draw, fault)
    if fault == "rank stopped":
        there = replace(there, timeout_s=8)  # the others find it so
    return Case(there, here, fault, draw.randrange(STEPS - 2), draw.randrange(there.world_size))


# What must be so ------------------------------------------------------------------------------------------------------


def numbers(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of every step in a run's metrics; the last line of a run that was killed may be cut."""
    lines = (folder / "metrics.jsonl").read_text().splitlines() if folder.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in found}


@cache
def of_one_process() -> list[tuple[float, float]]:
    found = train_in_one_process(BASE, load_data(BASE)[0], STEPS)
    return list(zip(found.losses, found.grad_norms))


def differs(found: dict[int, tuple[float, float]]) -> str | None:
    for step, pair in found.items():
        for x, want in zip(pair, of_one_process()[step]):
            if relative(abs(x - want), abs(want)) > 1e-10:
                return f"step {step} has {x!r}; one process has {want!r}"
    return None


def ran(folder: Path, *case: object) -> tuple[int, str, list[str]]:
    """Run the program; return its exit code, what it says, and everything that is left of it."""
    shutil.rmtree(folder / "temporary", ignore_errors=True)
    (folder / "case").write_bytes(pickle.dumps(case))
    program = Program(folder, PROGRAM)
    code, _, said = program.finish(timeout_s=240)
    return code, said, program.survivors() + program.leftovers()


def why_wrong(case: Case, folder: Path, never_stopped: dict[str, dict]) -> str | None:
    """Return in what a drawn case is not as it should be; None if all is well."""
    folder.mkdir()
    out, reference = folder / "run", folder / "never stopped"
    name = str(case.there.mesh_sizes) + str(case.there.zero) + case.there.offload
    if name not in never_stopped:
        code, said, left = ran(folder, replace(case.there, out=reference), "nothing", 0, 0)
        never_stopped[name] = numbers(reference)
        if code or left or (why := differs(never_stopped[name])):
            return f"the run that nothing ends: {said or left or why}"
    code, said, left = ran(folder, replace(case.there, out=out), *case[2:])
    want, words = FAULTS[case.fault]
    if code != want or not re.search(words.format(rank=case.rank), said, re.DOTALL):
        return f"it ended with {code}, not {want}: {said}"
    if left:
        return f"left by the run that was ended: {left}"
    if not numbers(out).items() <= never_stopped[name].items():
        return "until it ended, other numbers than the run that nothing ended"
    code, said, left = ran(folder, replace(case.here, out=out, resume=out), "nothing", 0, 0)
    if code or left:
        return f"the run that goes on ended with {code}: {said or left}"
    after = numbers(out)
    if STEPS - 1 not in after:
        return f"the run that goes on has steps {sorted(after)}"
    if case.here == case.there and not after.items() <= never_stopped[name].items():
        return "after it went on, other numbers than the run that nothing ended"
    return differs(after)


def chaos(folder: Path, seed: int, count: int, minutes: float = 0.0) -> tuple[int, list[str]]:
    """Try drawn cases, `count` of them or for so many minutes; return how many, and what is wrong."""
    draw, never_stopped, wrong, number = random.Random(seed), {}, [], 0
    begin_s = time.monotonic()
    while number < count and not (minutes and time.monotonic() - begin_s > 60 * minutes):
        case = drawn_case(draw, list(FAULTS)[number % len(FAULTS)])
        if (why := why_wrong(case, folder / str(number), never_stopped)) is not None:
            wrong.append(
                f"CHAOS_SEED={seed}, number {number}, {case.fault} at step {case.step}: {why}\n{case}"
            )
            print(f"\n{wrong[-1]}", flush=True)
        shutil.rmtree(folder / str(number))
        number += 1
    return number, wrong


@pytest.mark.thorough
def test_interrupted_runs_resume_to_the_losses_of_unbroken_ones(tmp_path):
    _, wrong = chaos(tmp_path, seed=0, count=8)
    assert not wrong


@pytest.mark.slow
def test_freshly_drawn_runs_that_something_ends_go_on(tmp_path, capsys):
    """For half of SOAK_MINUTES, or 100 of them; of a new seed unless CHAOS_SEED gives one."""
    minutes = float(os.environ.get("SOAK_MINUTES", 0)) / 2
    seed = int(os.environ.get("CHAOS_SEED", secrets.randbelow(1 << 31)))
    with capsys.disabled():
        number, wrong = chaos(tmp_path, seed, 10**9 if minutes else 100, minutes)
        print(f"\nCHAOS_SEED={seed}: {number - len(wrong)} of {number} ended runs went on to the same losses")
    assert not wrong


# Many calls -----------------------------------------------------------------------------------------------------------


def one_call(world, number):
    """Do something of what ranks do, now and then what they should not."""
    import torch

    x = torch.full((number % 7 * 1000 + 1,), float(world.rank))
    if number % 5 == 0:
        half = world.subgroup(
            [r for r in range(world.size) if r % 2 == world.rank % 2], f"half {world.rank % 2}"
        )
        half.all_reduce(x)
    if number % 5 == 1:
        ddp = DDP(torch.nn.Linear(8, 8), world)
        ddp(torch.ones(2, 8)).sum().backward()
    if number % 40 == 17 and world.rank == world.size - 1:
        raise KeyError(number)
    if number % 40 == 33 and world.rank == 0 and world.size > 1:
        world.send(x, 1)  # which nobody receives
    return world.all_reduce(x).sum().item()


def held() -> dict[str, int]:
    """The descriptors, threads and child processes of this process, and its resident megabytes."""
    status = Path("/proc/self/status").read_text()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "children": len(children),
        "megabytes": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1024,
    }


def many_calls(count: int) -> tuple[dict[str, int], dict[str, int]]:
    """Call ranks so often, in pools of 4; return what this process held after 80 calls, and after all."""
    after_few, failed = None, 0
    for number in range(count):
        size = 1 + number % 4
        try:
            found = minipar.run(one_call, number, world_size=size, timeout_s=30)
            assert len(found) == size
        except minipar.RankError:
            failed += 1
        if number == 80:
            after_few = held()
    assert failed == sum(n % 40 == 17 or (n % 40 == 33 and n % 4) for n in range(count))
    return after_few, held()


@pytest.mark.parametrize(
    "count", [pytest.param(400, marks=pytest.mark.thorough), pytest.param(5000, marks=pytest.mark.slow)]
)
def test_many_calls_leave_what_a_few_leave(count):
    few, many = many_calls(count)
    grown = many.pop("megabytes") - few.pop("megabytes")
    assert many == few
    assert grown < 30
