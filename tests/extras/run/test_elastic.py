"""A run goes on with fewer ranks: which mesh is chosen, and that the losses stay those of one process."""

import json
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_type_hints
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.choices import CHOSEN
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.cost import find_machine, step_time, worst_rank_memory
from minipar.extras.run.elastic import (
    ASSUMED,
    _legal,
    defaults,
    legal_meshes,
    machine_here,
    mesh_for,
    reason,
    train_on_ranks_there_are,
)
from minipar.runtime.launch import run
from minipar.schedules import make_schedule
from minipar.support import errors
from minipar.train import train
from minipar.train.data.text import load_data
from minipar.train.planned import job_and_layout, not_weighed
from minipar.train.reference import train_in_one_process
from minipar.train.state import ALIKE
from tests.examples import examples
from tests.programs import Program
from tests.train.verification.drawn_configs import Files, drawn_config

ROOT = Path(__file__).parents[3]
STEPS = 10
MODEL = ModelConfig(dim=16, num_layers=2, num_heads=2, max_seq_len=32, dropout=0.1)
CONFIG = TrainConfig(
    model=MODEL, dp=2, tp=2, steps=STEPS, batch_size=4, seq_len=32, warmup=2, dtype="float64", verify_steps=0,
    checkpoint_every=2, timeout_s=30, membership="elastic",
)  # fmt: skip
FLAGS = (
    *(
        "train",
        "--membership",
        "elastic",
        "--dp",
        2,
        "--tp",
        2,
        "--steps",
        STEPS,
        "--batch-size",
        4,
        "--seq-len",
        32,
        "--warmup",
        2,
    ),
    *("--model.dim", 16, "--model.num-layers", 2, "--model.num-heads", 2, "--model.max-seq-len", 32),
    *(
        "--model.dropout",
        0.1,
        "--dtype",
        "float64",
        "--verify-steps",
        0,
        "--timeout-s",
        30,
        "--checkpoint-every",
        2,
    ),
)

# The choice -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return Files.write(tmp_path_factory.mktemp("drawn"))


machines = st.sampled_from([1.0, 3.002e8, 3.2e8, 4e9]).map(lambda n: replace(ASSUMED, memory_bytes=n))


def legal(config: TrainConfig, changes: dict) -> TrainConfig | None:
    try:
        return replace(config, **changes)
    except ValueError:
        return None


def every_mesh(config: TrainConfig, world_size: int) -> list[TrainConfig]:
    """By trying all numbers."""
    found, most = [], config.batch_size // config.dp // config.microbatches
    numbers = range(1, world_size + 1)
    for pp, dp, cp, tp in product(numbers, repeat=4):
        if pp * dp * cp * tp != world_size or config.batch_size % dp:
            continue
        own = config.batch_size // dp
        m = min(m for m in range(1, own + 1) if own % m == 0 and own // m <= most)
        for ep in numbers if config.model.num_experts else [1]:
            axes = dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, microbatches=m)
            found.append(legal(config, axes) or legal(config, axes | defaults(config)))
    return [mesh for mesh in found if mesh is not None]


def weighed(config: TrainConfig, machine) -> tuple[float, float]:
    job, layout = job_and_layout(config, machine)
    return step_time(job, layout).total, sum(worst_rank_memory(job, layout)[1].values())


def best(meshes: list[TrainConfig], machine) -> list[TrainConfig]:
    """The fastest of those that fit, to four digits."""
    numbers = [(mesh, *weighed(mesh, machine)) for mesh in meshes]
    fitting = [(float(f"{s:.4g}"), n, mesh) for mesh, s, n in numbers if n <= machine.memory_bytes]
    least = min((pair[:2] for pair in fitting), default=None)
    return [mesh for *pair, mesh in fitting if tuple(pair) == least]


@examples(8)
@given(number=st.integers(0, 10_000), world_size=st.integers(1, 8), machine=machines)
def test_the_fastest_legal_mesh_is_chosen_and_keeps_the_numbers(files, number, world_size, machine):
    config = drawn_config(18, number, files)
    choice = mesh_for(config, world_size, machine)
    assert choice == mesh_for(config, world_size, machine)
    mesh = choice.config
    n = mesh.world_size
    assert n <= world_size
    assert not any(every_mesh(config, more) for more in range(n + 1, world_size + 1))
    assert [getattr(mesh, name) for name in (*ALIKE, "model", "steps", "lr")] == [
        getattr(config, name) for name in (*ALIKE, "model", "steps", "lr")
    ]
    assert (
        mesh.batch_size // mesh.dp // mesh.microbatches
        <= config.batch_size // config.dp // config.microbatches
    )
    meshes = every_mesh(config, n)
    assert sorted(map(repr, meshes)) == sorted(map(repr, legal_meshes(config, n)))
    if wanted := best(meshes, machine):
        assert mesh in wanted
        return
    smaller = [
        legal(
            one,
            dict(zero=zero, recompute=again, reduce_every="step" if zero > one.zero else one.reduce_every),
        )
        for one in meshes
        for zero in range(one.zero, 4)
        for again in (one.recompute, "full")
    ]
    smaller = [one for one in smaller if one is not None]
    if wanted := best(smaller, machine):
        assert mesh in wanted
    else:
        assert not choice.fits
        assert choice.num_bytes == min(weighed(one, machine)[1] for one in smaller)


def test_the_line_says_what_was_chosen_and_why():
    machine = replace(ASSUMED, memory_bytes=1.0)
    for ranks, memory, words in (
        (2, ASSUMED, "elastic: 2 ranks, and dp2-tp2 needs 4: going on with dp2, the fastest of 4 legal meshes "
                     r"\(by the planner, \S+ s a step on a CPU, assumed\)$"),
        (3, ASSUMED, r"elastic: 3 ranks, .* going on with dp2, .*; 1 of the ranks is left over$"),
        (2, machine, "the smallest of 4 legal meshes"),
        (1, machine, r"going on with dp1 \(microbatches=2, recompute=full\), .* though its 0.\d+ GB a rank may not fit$"),
    ):  # fmt: skip
        assert re.search(words, reason(CONFIG, ranks, memory, mesh_for(CONFIG, ranks, memory)))


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        (dict(), []),
        (dict(pp=2, microbatches=2, schedule=("seq1f1b", {"slices": 2})), ["schedule=seq1f1b (as 1f1b)"]),
        (dict(pp=2, dp=1, microbatches=2, schedule="v-min"), ["schedule=v-min (as 1f1b)"]),
        (dict(pp=2, dp=1, microbatches=1, schedule="zb-h1"), ["schedule=zb-h1 (as 1f1b)"]),
        (dict(tp=1, optimizer="muon"), ["optimizer=muon"]),
        (dict(dp=1, tp=4, tp_layout="2d", offload_activations=True), ["tp_layout=2d", "offload_activations=True"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_weighed_is_named(changes, left_out):
    model = replace(MODEL, num_layers=4, num_heads=4, vocab_size=256)
    chosen = {name: changes[name] for name in changes if name in CHOSEN}
    plain = {name: changes[name] for name in changes if name not in CHOSEN}
    config = replace(CONFIG, membership="fixed", model=model, **dict(tp=1) | plain).choosing(**chosen)
    assert sorted(not_weighed(config)) == sorted(left_out)
    job, layout = job_and_layout(config, ASSUMED)
    assert layout.world_size == job.gpus == config.world_size
    line = reason(config, 1, ASSUMED, mesh_for(config, config.world_size))
    assert all(words in line for words in left_out)
    assert ("not weighed" in line) == bool(left_out)


def test_choosing_a_mesh_repeats_no_schedule_or_annotation():
    """What a choice costs is counted, not timed: over a thousand configurations are checked for it."""
    model = replace(MODEL, num_layers=24, num_heads=12, dim=48, num_experts=12, top_k=2)
    config = replace(CONFIG, model=model, batch_size=48, schedule="zb-v", microbatches=4)
    with (
        mock.patch("minipar.config.train_config.make_schedule", wraps=make_schedule) as made,
        mock.patch("minipar.support.options.get_type_hints", wraps=get_type_hints) as evaluated,
        mock.patch("minipar.extras.run.elastic._legal", wraps=_legal) as tried,
    ):
        mesh_for(config, 48)
    assert tried.call_count > 1000
    assert made.call_count == len({call.args[:3] for call in made.call_args_list})
    assert evaluated.call_count == 0


def test_a_measured_machine_is_planned_for_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert machine_here().gpus_per_node == 2
    from minipar.extras.run.calibrate import write_machine

    write_machine(tmp_path / "local.toml", replace(ASSUMED, name="measured", peak_flops=1e9))
    assert machine_here() == replace(find_machine("local.toml"), gpus_per_node=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(checkpoint_every=0),
            "membership=elastic goes on from checkpoints, and checkpoint_every=0; use 1 or more",
        ),
        (dict(compress="topk"), "losses of compress=topk depend on it; use compress=none"),
        (dict(compress="topk", options={"compress": {"fraction": 1.0}}), "compress=topk depend on it"),
    ],
)
def test_what_could_not_go_on_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(CONFIG, **changes)


def test_without_torchrun_there_is_nothing_to_choose(tmp_path):
    with pytest.raises(ValueError, match="torchrun has not started this; use torchrun --nnodes"):
        train(replace(CONFIG, out=tmp_path))


# The run --------------------------------------------------------------------------------------------------------------


def _stopped_by_a_signal(world, folder):
    def train(config, comm):
        raise errors.Stopped("stopped and saved")

    try:
        return train_on_ranks_there_are(replace(CONFIG, out=folder), world, train)
    except errors.Stopped:
        return "stopped"


def test_unused_ranks_end_with_a_run_that_a_signal_stops(tmp_path):
    assert run(_stopped_by_a_signal, tmp_path, world_size=3) == ["stopped", "stopped", None]


@pytest.fixture(scope="module")
def one_process() -> list[float]:
    config = replace(CONFIG, dp=1, tp=1)
    return train_in_one_process(config, load_data(config)[0], STEPS).losses


def assert_losses(folder: Path, one_process: list[float]) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines}
    assert losses.keys() == set(range(STEPS))
    assert [losses[step] for step in range(STEPS)] == pytest.approx(one_process, rel=1e-10)


class Stopped(Exception):
    pass


@pytest.mark.thorough
def test_a_run_of_4_ranks_resumes_on_2_of_3_like_one_process(tmp_path, one_process):
    def stop(what, metrics):
        if metrics["step"] == 6:
            raise Stopped

    with pytest.raises(Stopped):
        train(replace(CONFIG, membership="fixed", out=tmp_path), stop)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    torchrun += ("--log-dir", str(tmp_path / "logs"))
    program = subprocess.run(
        [sys.executable, *torchrun, "-m", "minipar", *map(str, FLAGS), "--out", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, timeout=600,
    )  # fmt: skip
    assert program.returncode == 0, program.stderr
    assert program.stderr.count("elastic: 3 ranks, and dp2-tp2 needs 4: going on with dp2, ") == 1
    assert "1 of the ranks is left over" in program.stderr
    assert re.search(r"going on from .*step-\d+ with dp=2, tp=1|tp=1 \(was 2\)", program.stderr)
    assert_losses(tmp_path, one_process)


LOST_NODE = """
    import os, signal
    import torch
    from minipar.cli import main

    updates, update, lost_in = [], torch.optim.AdamW.step, {lost_in}

    def mortal_update(self, *args, **kwargs):
        updates.append(None)
        if len(updates) == lost_in:
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun's agent, as both of its ranks do
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, *args, **kwargs)

    torch.optim.AdamW.step = mortal_update
    main({flags})
"""


@pytest.mark.slow
def test_after_losing_a_node_a_run_has_one_processs_losses(tmp_path, one_process):
    """Two agents of torchrun's with two ranks each. One is killed, with its ranks; nothing of either is left at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [*map(str, FLAGS), "--out", str(tmp_path / "run")]
    nodes = []
    try:
        for node, lost_in in enumerate((None, 7)):
            launcher = (
                *("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"),
                *("--max-restarts", "3", "--log-dir", str(tmp_path / f"logs{node}")),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"),
                *("--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=10"),
                *("--local-addr", "127.0.0.1"),
            )
            (tmp_path / str(node)).mkdir()
            nodes.append(
                Program(tmp_path / str(node), LOST_NODE.format(lost_in=lost_in, flags=flags), launcher)
            )
        status, _, said = nodes[0].finish(timeout_s=240)
        assert status == 0, said
        assert nodes[1].finish()[0] == -signal.SIGKILL
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.process.terminate()  # torchrun then ends its ranks
                node.process.wait()
    assert [node.survivors(timeout_s=30) for node in nodes] == [[], []]
    assert [node.leftovers() for node in nodes] == [[], []]
    assert "elastic: 2 ranks, and dp2-tp2 needs 4: going on with dp2, " in said
    assert re.search(r"going on from .*step-0*[246] with", said)
    assert_losses(tmp_path / "run", one_process)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))  # nobody listens there any more
