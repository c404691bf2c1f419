"""A run that stops on one mesh and goes on on another is the run that never stopped."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.model import from_huggingface
from minipar.train import generate_text, train
from minipar.train.checkpoint.export import export_llama, full_parameters
from minipar.train.checkpoint.restore import Checkpoint, checkpoints, newest_whole
from minipar.train.data.text import TextId
from minipar.train.state import require_same_run
from minipar.train.verification.legal_configs import legal_configs
from tests.examples import examples

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
    verify_steps=0,
    trace_steps=0,
)
MIXTURE = ModelConfig(
    dim=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=32,
    num_experts=4,
    top_k=2,
    group_tokens=4,
    balance_bias=True,
)


@cache
def layouts(model: ModelConfig) -> list[TrainConfig]:
    """BASE with this model on every legal mesh of 1 to 8 ranks, with every ZeRO stage or schedule."""
    return [
        config for n in (1, 2, 4, 8) for config in legal_configs(replace(BASE, model=model, grad_clip=0.5), n)
    ]


def losses(result):
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in result.metrics}


def stop_before_the_last_save(run: Path) -> Path:
    """Leave a run's folder as if it had been killed then."""
    shutil.rmtree(checkpoints(run / "checkpoints")[0])
    return run


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    return {
        model: losses(train(replace(BASE, model=model, grad_clip=0.5, out=tmp_path_factory.mktemp("whole"))))
        for model in (SMALL, MIXTURE)
    }


@pytest.mark.thorough
@examples(4)
@given(st.data())
@pytest.mark.parametrize("model", [SMALL, MIXTURE], ids=["dense", "experts"])
def test_it_goes_on_as_if_it_had_never_stopped(never_stopped, tmp_path_factory, model, data):
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    there, here = (data.draw(st.sampled_from(layouts(model)), label=x) for x in ("written on", "resumed on"))
    train(replace(there, checkpoint_every=3, out=first))
    resumed = losses(train(replace(here, resume=stop_before_the_last_save(first), out=second)))
    assert list(resumed) == [3, 4]
    for step, (loss, norm) in resumed.items():
        assert loss == pytest.approx(never_stopped[model][step][0], rel=1e-10)
        assert norm == pytest.approx(never_stopped[model][step][1], rel=1e-7)


GRIDS = {
    "2d": dict(tp=4, tp_layout="2d", zero=1),
    "2.5d": dict(tp=8, tp_layout="2.5d", zero=3),
    "3d": dict(tp=8, tp_layout="3d"),
    "1d": dict(tp=2, dp=2, zero=1),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("there", "here"), [("2.5d", "1d"), pytest.param("2d", "3d", marks=pytest.mark.slow)]
)
def test_blocks_of_a_grid_of_ranks_go_on_on_any_other_mesh(never_stopped, tmp_path, there, here):
    run = replace(BASE, model=SMALL, grad_clip=0.5)
    train(run.choosing(**GRIDS[there], checkpoint_every=3, out=tmp_path / "first"))
    stopped = stop_before_the_last_save(tmp_path / "first")
    resumed = losses(train(replace(run, **GRIDS[here], resume=stopped, out=tmp_path / "second")))
    assert list(resumed) == [3, 4]
    for step, numbers in resumed.items():
        assert numbers == pytest.approx(never_stopped[SMALL][step], rel=1e-10)


@pytest.mark.thorough
def test_a_run_resumes_in_its_own_folder_even_an_empty_one(tmp_path):
    again = replace(BASE, checkpoint_every=2, out=tmp_path, resume=tmp_path)
    assert list(losses(train(again))) == [0, 1, 2, 3, 4]
    assert list(losses(train(replace(again, steps=7)))) == [5, 6]


@pytest.mark.thorough
@pytest.mark.parametrize("here", [dict(dp=2, zero=2), dict(tp=2, pp=2, zero=1, microbatches=2)], ids=str)
def test_master_copies_go_on_without_losing_a_digit(tmp_path, here):
    run = replace(BASE, dtype="bfloat16", dp=2, zero=1)
    whole = train(replace(run, out=tmp_path / "whole", checkpoint_every=5))
    train(replace(run, out=tmp_path / "first", checkpoint_every=3))
    stop_before_the_last_save(tmp_path / "first")
    same = train(replace(run, out=tmp_path / "same", resume=tmp_path / "first"))
    assert losses(same) == {step: losses(whole)[step] for step in (3, 4)}
    other = train(replace(run, **{"dp": 1, **here}, out=tmp_path / "other", resume=tmp_path / "first"))
    for step, (loss, _) in losses(other).items():
        assert loss == pytest.approx(losses(whole)[step][0], rel=1e-2)
    stored = full_parameters(Checkpoint(newest_whole(tmp_path / "whole" / "checkpoints")))
    assert stored["layers.0.mlp.up.weight"].dtype == torch.float32
    assert generate_text(tmp_path / "whole", "a", 4, tp=2) == generate_text(tmp_path / "whole", "a", 4)


@pytest.mark.thorough
def test_a_new_run_does_not_write_among_the_checkpoints_of_another(tmp_path):
    run = replace(BASE, steps=4, checkpoint_every=2, out=tmp_path / "first")
    train(run)
    train(replace(run, out=tmp_path / "second"))
    kept = sorted(path.name for path in (tmp_path / "first" / "checkpoints").iterdir())
    for other in (replace(run, seed=1), replace(run, steps=6, resume=tmp_path / "second")):
        with pytest.raises(
            ValueError, match=r"has checkpoints of an earlier run; go on with that by --resume"
        ):
            train(other)
    assert sorted(path.name for path in (tmp_path / "first" / "checkpoints").iterdir()) == kept
    train(replace(run, steps=6, resume=tmp_path / "first"))


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


def test_a_checkpoint_older_than_a_field_of_the_model_goes_on(tmp_path):
    train(replace(BASE, steps=2, checkpoint_every=2, out=tmp_path))
    checkpoint = Checkpoint(newest_whole(tmp_path / "checkpoints"))
    for name in ("head_dim", "qkv_bias", "qk_norm", "rope_scaling"):
        del checkpoint.extra["model"][name]
    text = TextId(checkpoint.extra["text"])
    require_same_run(BASE, checkpoint, text)
    with pytest.raises(ValueError, match="qk_norm=True, but .* is of a run with qk_norm=False"):
        require_same_run(replace(BASE, model=replace(SMALL, qk_norm=True)), checkpoint, text)


def test_a_checkpoint_becomes_a_llama_and_back(tmp_path):
    train(
        replace(
            BASE, steps=2, checkpoint_every=2, dp=2, out=tmp_path / "run", model=replace(SMALL, dropout=0.0)
        )
    )
    checkpoint = Checkpoint(newest_whole(tmp_path / "run" / "checkpoints"))
    export_llama(checkpoint, tmp_path / "llama")
    config, parameters = from_huggingface(tmp_path / "llama")
    assert config == replace(SMALL, dropout=0.0)
    want = full_parameters(checkpoint)
    assert parameters.keys() == want.keys()
    assert all(torch.equal(parameters[name], want[name]) for name in want)
