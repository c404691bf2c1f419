"""A rank is killed in the middle of a run: who stops, who says so, and how the run goes on from its last checkpoint."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.runtime import call, launch
from minipar.support.errors import RankError
from minipar.train import train

ROOT = Path(__file__).parents[2]
SMALL = ModelConfig(dim=16, num_layers=2, num_heads=2, max_seq_len=32, dropout=0.1)
STEPS, EVERY = 10, 2


def config(out: Path, **changes) -> TrainConfig:
    options = dict(model=SMALL, dp=2, batch_size=4, seq_len=32, steps=STEPS, warmup=2, dtype="float64")
    return TrainConfig(**options | dict(verify_steps=0, timeout_s=30, out=out) | changes)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory) -> dict[int, tuple]:
    train(config(tmp_path_factory.mktemp("never stopped")))
    return numbers(tmp_path_factory.getbasetemp() / "never stopped0")


def numbers(folder: Path) -> dict[int, tuple]:
    """Of every step in a run's metrics, what must not depend on what happened to the run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"], line["lr"]) for line in lines}


@pytest.mark.thorough
def test_a_run_killed_under_torchrun_resumes_to_unbroken_losses(tmp_path, never_stopped):
    out = tmp_path / "run"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "2", "--nproc-per-node", "2")
    torchrun += ("--log-dir", str(tmp_path / "logs"))
    flags = (
        *("train", "--dp", "2", "--steps", STEPS, "--batch-size", 4, "--seq-len", 32, "--warmup", 2),
        *("--model.dim", 16, "--model.num-layers", 2, "--model.num-heads", 2, "--model.max-seq-len", 32),
        *("--model.dropout", 0.1, "--dtype", "float64", "--verify-steps", 0, "--timeout-s", 30),
        *("--checkpoint-every", EVERY, "--out", out, "--resume", out),
    )
    program = subprocess.Popen(
        [sys.executable, *torchrun, "-m", "tests.train.mortal", str(tmp_path), "1:6,0:4", *map(str, flags)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        said, _ = program.communicate(timeout=600)
    finally:
        program.terminate()  # torchrun then ends its ranks; if it were killed, they would live on
        program.wait()
    assert program.returncode == 0, said
    lives = Counter((tmp_path / "updates.txt").read_text().splitlines())
    # The first life began at 0 and died in its 6th update, the second in its 4th; each began where a checkpoint was.
    assert lives["0 1"] == 6
    assert lives["1 0"] == 4
    begun = STEPS - lives["2 0"]
    assert begun in (2, 4, 6), "the last life did not begin at a checkpoint"
    after = numbers(out)
    assert set(range(begun, STEPS)) <= after.keys()
    assert after.items() <= never_stopped.items()


def test_a_local_rank_that_is_killed_stops_everyone_and_is_named(tmp_path, never_stopped, monkeypatch):
    monkeypatch.setattr(call, "GRACE_S", 10.0)  # for a rank that answers late
    processes, killed = set(), []

    def kill_rank_1(what, metrics):
        pids = launch._pools["gloo"].pids
        processes.update(pids)
        if metrics["step"] == 4:  # rank 1 is in the next step, or about to begin it
            killed.append(pids[1])
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(RankError, match="rank 1 failed:\nits process was killed by SIGKILL") as caught:
        train(config(tmp_path, checkpoint_every=EVERY), kill_rank_1)
    assert len(killed) == 1
    assert caught.value.rank == 1
    assert caught.value.waiting.keys() == {0}
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    # And the same command, with its own folder to resume from, goes on.
    train(config(tmp_path, checkpoint_every=EVERY, resume=tmp_path))
    after = numbers(tmp_path)
    assert {STEPS - 1} <= after.keys()
    assert after.items() <= never_stopped.items()
