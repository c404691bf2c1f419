from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from minipar.config.choices import Averaging
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig
from minipar.train import train
from minipar.train.verification import verify
from tests.config.advice import followed, refusal


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"dp": 0}, "dp=0 is out of range; use 1 or more"),
        ({"dp": 3}, "dp=3 does not divide batch_size=16; use 1, 2, 4, 8 or 16"),
        ({"dp": 3, "ep": 2, "moe": 4}, "dp=3 does not divide batch_size=16; use 2, 4, 8 or 16"),
        ({"dp": 4, "microbatches": 3}, "microbatches=3 does not divide"),
        ({"steps": 0}, "steps=0"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": float("inf")}, "lr=inf is no number to compute with"),
        ({"steps": 1.5}, "steps=1.5 is a float; use a whole number"),
        ({"batch_size": 16.0}, "batch_size=16.0 is a float; use a whole number"),
        ({"microbatches": True}, "microbatches=True is a bool; use a whole number"),
        ({"name": "../up"}, "name='../up' is not the name of one folder; use out for a path"),
        (
            {"moe": 4, "model": ModelConfig(num_layers=1)},
            "none has experts with moe_every=2; use moe_every=1",
        ),
        ({"grad_clip": -1.0}, "grad_clip=-1.0"),
        ({"dtype": "float8"}, "use float32, float64, bfloat16 or float16"),
        ({"seq_len": 512}, "seq_len=512 exceeds max_seq_len=256; use 256 or fewer"),
        ({"model": ModelConfig(vocab_size=100)}, "vocab_size=100 does not hold every byte"),
    ],
)
def test_an_impossible_run_is_refused_with_what_would_work(wrong, says):
    with pytest.raises(ValueError, match=says.replace(".", r"\.")):
        TrainConfig(**wrong)


def test_one_machine_starts_64_ranks_at_most():
    config = TrainConfig(dp=128, batch_size=128)
    for starts_ranks in (train, verify):
        with pytest.raises(ValueError, match="makes 128 ranks on one machine; use at most 64, or torchrun"):
            starts_ranks(config)


def test_the_folder_is_named_after_the_mesh_unless_told(tmp_path):
    assert str(TrainConfig(dp=4).folder) == "runs/dp4"
    assert str(TrainConfig(name="mine").folder) == "runs/mine"
    assert TrainConfig(out=tmp_path, name="mine").folder == tmp_path


def test_the_learning_rate_scales_from_its_reference_batch_size():
    rates = [TrainConfig(lr=0.1, batch_size=16, **scale).highest_lr for scale in [
        {}, {"lr_scale": "linear", "lr_batch_size": 4}, {"lr_scale": "sqrt", "lr_batch_size": 4},
        {"lr_scale": "linear", "lr_batch_size": 64}, {"lr_scale": "sqrt", "lr_batch_size": 16},
    ]]  # fmt: skip
    assert rates == pytest.approx([0.1, 0.4, 0.2, 0.025, 0.1], rel=1e-12)
    for wrong in ({"lr_scale": "linear"}, {"lr_batch_size": 4}, {"lr_scale": "sqrt", "lr_batch_size": 0}):
        with pytest.raises(ValueError, match="lr_batch_size"):
            TrainConfig(**wrong)


@pytest.mark.parametrize(
    "changes",
    [
        dict(kv_latent_dim=16),
        dict(cp=8, cp_attention="ulysses"),
        dict(cp=8, cp_attention="usp", cp_ulysses=8),
        dict(cp=2, tp=4, num_kv_heads=4, cp_attention="ulysses"),
        dict(cp=3),
        dict(cp=3, cp_layout="striped"),
        dict(cp=2, num_experts=4),
        dict(cp=2, num_experts=4, cp_layout="striped"),
        dict(dp=4, cp=2, num_experts=4, cp_layout="contiguous"),
        dict(reduce_every="microbatch"),
        dict(gather_every="stage"),
    ],
)
def test_advice_that_is_followed_works(changes):
    first, second = followed(VERIFY_DEFAULTS, changes)
    assert second == "", f"{first}\n{second}"


def test_no_advice_of_a_run_names_what_only_a_function_takes():
    """`pad=True` is an argument of context_parallel, and no flag."""
    for attention in ("ulysses", "usp"):
        assert "pad" not in refusal(VERIFY_DEFAULTS, dict(cp=8, cp_attention=attention, cp_ulysses=8))


@dataclass(frozen=True)
class OfLater:
    old: int = 1
    new: bool = True


@pytest.mark.parametrize(
    ("kept", "options", "stored"),
    [((), {}, {}), (("old", "new"), {"compress": OfLater()}, {"compress": {"old": 1}})],
    ids=["without options", "with an option that there was not yet"],
)
def test_an_averaging_resumes_its_own_checkpoint(kept, options, stored):
    averaging, config = Averaging("its:code"), SimpleNamespace(compress="mine", options=options)
    averaging.kept = kept
    averaging.require_resumable(config, {"compress": "mine", "options": stored}, "it was saved")
    with pytest.raises(ValueError, match="compress=mine, but it was saved with compress=other"):
        averaging.require_resumable(config, {"compress": "other", "options": stored}, "it was saved")
