"""A run that stops on one mesh and goes on on another is the run that never stopped."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar.model import ModelConfig
from minipar.train import TrainConfig, train
from minipar.train.export import export_llama, full_parameters, import_llama
from minipar.train.restore import Checkpoint, newest_whole

SMALL = ModelConfig(
    dim=16, num_layers=4, num_heads=4, num_kv_heads=2, max_seq_len=32, dropout=0.1, tie_embeddings=True
)
BASE = TrainConfig(
    model=SMALL,
    batch_size=8,
    seq_len=32,
    steps=5,
    warmup=2,
    dtype="float64",
    timeout_s=10,
    verify_steps=0,
    trace_steps=0,
)
MESHES = [
    dict(),
    dict(dp=4, zero=1),
    dict(dp=2, tp=2, zero=2),
    dict(pp=2, tp=2, microbatches=2),
    dict(pp=2, cp=2, microbatches=2, schedule="zb-v", zero=1),
    dict(dp=2, cp=2, tp=2, zero=3),
    dict(dp=3, batch_size=9, zero=3),
]
meshes = st.sampled_from(MESHES[:-1])


def losses(result):
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in result.metrics}


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    return losses(train(replace(BASE, out=tmp_path_factory.mktemp("whole"))))


@settings(max_examples=6)
@given(meshes, meshes)
def test_it_goes_on_as_if_it_had_never_stopped(never_stopped, tmp_path_factory, there, here):
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    train(replace(BASE, checkpoint_every=3, out=first, **there))
    resumed = losses(train(replace(BASE, resume=first, out=second, **here)))
    assert list(resumed) == [3, 4]
    for step, (loss, norm) in resumed.items():
        assert loss == pytest.approx(never_stopped[step][0], rel=1e-10)
        assert norm == pytest.approx(never_stopped[step][1], rel=1e-7)


def test_a_run_can_continue_in_its_own_folder_from_nothing_or_from_its_newest_checkpoint(tmp_path):
    again = replace(BASE, checkpoint_every=2, out=tmp_path, resume=tmp_path)
    assert list(losses(train(again))) == [0, 1, 2, 3, 4]
    assert list(losses(train(replace(again, steps=6)))) == [4, 5]


def test_another_run_is_not_continued(tmp_path):
    train(replace(BASE, steps=2, checkpoint_every=2, out=tmp_path))
    for wrong, says in [
        (dict(seed=1), "seed=1, but"),
        (dict(dtype="float32"), "dtype='float32', but"),
        (dict(model=replace(SMALL, dim=32)), "dim=32, but"),
        (dict(steps=2), "steps=2: .* has done 2; use more steps"),
        (dict(resume=tmp_path / "nowhere"), "has no whole checkpoint"),
    ]:
        with pytest.raises(ValueError, match=says):
            train(replace(BASE, **{"out": tmp_path / "second", "resume": tmp_path, **wrong}))


def test_a_checkpoint_becomes_a_llama_and_back(tmp_path):
    train(
        replace(
            BASE, steps=2, checkpoint_every=2, dp=2, out=tmp_path / "run", model=replace(SMALL, dropout=0.0)
        )
    )
    checkpoint = Checkpoint(newest_whole(tmp_path / "run" / "checkpoints"))
    export_llama(checkpoint, tmp_path / "llama")
    config, parameters = import_llama(tmp_path / "llama")
    assert config == replace(SMALL, dropout=0.0)
    want = full_parameters(checkpoint)
    assert parameters.keys() == want.keys()
    assert all(torch.equal(parameters[name], want[name]) for name in want)
