"""Where states are between two steps changes no bit of a run, with any ZeRO stage, in checkpoints and after a resume."""

import os
from dataclasses import replace

import pytest

from minipar.config.check_paths import CHECKPOINTS, check_paths
from minipar.config.choices import MEMORIES
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig
from minipar.train import train
from minipar.train.checkpoint.restore import Checkpoint
from minipar.train.verification.legal_configs import legal_configs

RUN = TrainConfig(
    model=ModelConfig(dim=16, num_layers=2, num_heads=2, max_seq_len=32, tie_embeddings=True),
    **dict(
        dp=2, batch_size=4, seq_len=32, steps=4, warmup=2, checkpoint_every=2, verify_steps=0, trace_steps=4
    ),
    **dict(bucket_mb=0.01),
)


def bits(folder, step: int) -> dict:
    """Every part that a checkpoint stores, and the numbers beside them."""
    checkpoint = Checkpoint(folder / CHECKPOINTS / f"step-{step:08}")
    return {(key, digest) for _, key, digest in checkpoint.stored_parts()}, checkpoint.extra["numbers"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "mesh",
    [
        dict(zero=1, dtype="bfloat16"),
        dict(zero=2),
        dict(zero=3, pp=2, microbatches=2, dtype="bfloat16"),  # FSDP leaves the tied embedding whole
    ],
    ids=str,
)
def test_a_run_has_the_same_bits_wherever_its_states_are(tmp_path, mesh):
    spool = tmp_path / "spool"
    spool.mkdir()
    plain = replace(RUN, out=tmp_path / "none", **mesh)
    runs = {"none": train(plain)}
    for offload, where in (("cpu", {}), ("disk", {"folder": spool})):
        out = tmp_path / offload
        runs[offload] = train(plain.choosing(out=out, offload=(offload, where)))
        assert bits(out, 2) == bits(plain.folder, 2)
        assert bits(out, 4) == bits(plain.folder, 4)
    assert os.listdir(spool) == []
    disk = [s for s in runs["disk"].traces[0] if s.kind == "disk"]
    assert {s.name for s in disk} == {"read", "write"}
    for newest in (tmp_path / "disk" / CHECKPOINTS).glob("step-00000004"):
        newest.rename(tmp_path / "set-aside")
    there = plain.choosing(resume=tmp_path / "disk", out=tmp_path / "resumed", offload="disk")
    train(there)
    assert bits(there.folder, 4) == bits(plain.folder, 4)


def test_every_stage_takes_its_turn_with_every_memory_in_the_sweep():
    swept = {(config.zero, config.offload) for config in legal_configs(VERIFY_DEFAULTS, 8)}
    assert swept == {(0, "none")} | {(zero, offload) for zero in (1, 2, 3) for offload in MEMORIES}
    asked = {(c.zero, c.offload) for c in legal_configs(VERIFY_DEFAULTS.choosing(zero=1, offload="disk"), 4)}
    assert asked == {(zero, "disk") for zero in (1, 2, 3)}


def test_what_cannot_be_offloaded_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="offload=cpu is for the states that zero cuts, and zero=0; use zero=1"
    ):
        replace(RUN, offload="cpu")
    with pytest.raises(ValueError, match="offload.folder: offload=cpu has no options"):
        RUN.choosing(zero=1, offload=("cpu", {"folder": tmp_path}))
    with pytest.raises(ValueError, match="is no folder to write to; use one that is there"):
        check_paths(RUN.choosing(zero=1, offload=("disk", {"folder": tmp_path / "missing"})))
