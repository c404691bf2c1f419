"""`--compress` in whole runs: every method on meshes, what equality means, what resumes, what is refused in words."""

from dataclasses import replace

import pytest
import torch

import minipar
from minipar.data_parallel.compress import Sign
from minipar.expert import gradient_comm
from minipar.mesh import Mesh, placement_of
from minipar.model import ModelConfig
from minipar.train import TrainConfig, train, verify
from minipar.train.compression import KIND, stored_parts
from minipar.train.compression_config import METHODS, exact_steps
from minipar.train.parallelize import parallelize
from minipar.train.restore import Checkpoint, newest_whole
from minipar.train.step import train_step
from minipar.train.text import load_data

SMALL = ModelConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=2, max_seq_len=16)
BASE = TrainConfig(
    model=SMALL, batch_size=4, seq_len=16, steps=6, warmup=2, verify_steps=0, trace_steps=0, timeout_s=20
)
OPTIONS = {
    "onebit-adam": dict(compress_warmup=2),
    "zero-one-adam": dict(compress_warmup=2, compress_every=3),
    "onebit-lamb": dict(compress_warmup=2, optimizer="lamb", lr=0.05),
    "local-sgd": dict(compress_every=3),
    "diloco": dict(compress_every=3, compress_warmup=1),
}


def config_of(method: str, **more) -> TrainConfig:
    return replace(BASE, compress=method, **OPTIONS.get(method, {}), **more)


def run_all(world, configs, text):
    """Of each run: the losses, and whether ranks with the same part of a parameter have the same bits."""
    found = []
    for config in configs:
        state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
        losses = [train_step(world, state, config, text, step)["loss"] for step in range(config.steps)]
        params = [p for stage in state.stages for p in stage.parameters()]
        found.append((losses, [(placement_of(p).part, p.detach()) for p in params]))
    return found


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 4}])
def test_every_method_ends_on_equal_replicas_of_every_mesh(mesh):
    if mesh == {"dp": 4}:
        two_levels = {"compress_node_size": 2}
    configs = []
    for method, row in METHODS.items():
        if method == "onebit-lamb" and "tp" in mesh:
            continue
        nodes = two_levels if mesh == {"dp": 4} and "compress_node_size" in row.uses else {}
        configs.append(config_of(method, **mesh, **nodes))
    plain = replace(BASE, **mesh)
    ranks = minipar.run(run_all, [plain, *configs], load_data(BASE)[0], world_size=4, timeout_s=20)
    for i, config in enumerate([plain, *configs]):
        copies: dict = {}
        for losses, params in (rank[i] for rank in ranks):
            assert losses == ranks[0][i][0]
            assert losses[-1] < losses[0], config.compress
            for part, param in params:
                copies.setdefault(part, []).append(param)
        for part, params in copies.items():
            assert all(torch.equal(p, params[0]) for p in params), (config.compress, part[0])
        if i:
            assert ranks[0][i][0] != ranks[0][0][0], f"{config.compress} compresses nothing"


# Equality -----------------------------------------------------------------------------------------------------------


EXACT = [
    dict(compress="topk", compress_fraction=1.0, dp=2, tp=2),
    dict(compress="powersgd", compress_rank=16, dp=2, pp=2, zero=1),
    dict(compress="sign", tp=2),
    dict(compress="onebit-adam", compress_warmup=2, dp=2, tp=2),
]


TWO_COPIES = dict(dp=1, pp=2, schedule="chimera", microbatches=2)


@pytest.mark.parametrize("options", EXACT, ids=lambda options: options["compress"])
def test_what_loses_nothing_has_the_numbers_of_one_process(options):
    result = verify(replace(BASE, steps=2, dtype="float64", **options))
    assert result.equal, result.first_divergence


def test_zero_1_of_a_run_has_the_losses_of_zero_0():
    configs = [config_of(method, dp=2, zero=zero) for method in ("sign", "powersgd") for zero in (0, 1)]
    (sign0, sign1, power0, power1) = minipar.run(
        run_all, configs, load_data(BASE)[0], world_size=2, timeout_s=20
    )[0]
    assert sign0[0] == pytest.approx(sign1[0], rel=1e-6)
    assert power0[0] == pytest.approx(power1[0], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(compress="sign"), "compress=sign is lossy.*dp=1 and cp=1 or compress_warmup=6"),
        (dict(compress="topk"), "compress_fraction=1, dp=1"),
        (dict(compress="powersgd"), r"compress_rank=16 \(full rank\)"),
        (dict(compress="zero-one-adam", compress_every=3), "no uncompressed step"),
        (dict(compress="diloco", compress_every=3), "compress_warmup=6"),
        (TWO_COPIES | dict(compress="int8"), "compress=int8 is lossy.*dp=1 and cp=1, in one direction or"),
    ],
)
def test_a_lossy_method_is_not_verified(options, words):
    with pytest.raises(ValueError, match=words):
        verify(replace(BASE, **dict(dp=2) | options))


def test_two_levels_are_of_the_ranks_of_both_copies_of_the_model():
    result = verify(
        replace(
            BASE,
            steps=1,
            dtype="float64",
            **TWO_COPIES,
            compress="topk",
            compress_fraction=1.0,
            compress_node_size=2,
        )
    )
    assert result.equal, result.first_divergence
    with pytest.raises(
        ValueError, match=r"compress_node_size=4 does not divide .* \(dp\*cp\*2/ep\)=2; use 1 or 2"
    ):
        replace(BASE, **TWO_COPIES, compress="int8", compress_node_size=4)


# Resuming -----------------------------------------------------------------------------------------------------------


def losses_of(config) -> list[float]:
    return [line["loss"] for line in train(config).metrics]


@pytest.mark.parametrize(
    "method",
    ["sign", "zero-one-adam", "diloco"]
    + [
        pytest.param(m, marks=pytest.mark.slow)
        for m in METHODS
        if m not in ("sign", "zero-one-adam", "diloco")
    ],
)
def test_a_stopped_run_goes_on_to_the_losses_of_one_that_was_not_stopped(method, tmp_path):
    config = config_of(method, dp=2, out=tmp_path / "whole", checkpoint_every=3, keep=0)
    whole = losses_of(config)
    (tmp_path / "whole" / "checkpoints" / "step-00000006").rename(tmp_path / "last")
    assert losses_of(replace(config, resume=tmp_path / "whole", out=tmp_path / "whole")) == whole[3:]
    if method == "sign":
        (tmp_path / "whole" / "checkpoints" / "step-00000006").rename(tmp_path / "again")
        other = replace(config, dp=4, resume=tmp_path / "whole", out=tmp_path / "whole")
        assert losses_of(other) == pytest.approx(whole[3:], rel=0.01), "on another number of replicas"
        for change, words in (
            (
                dict(compress="none"),
                "compress=none, but .* of a run with compress=sign, whose state is of another kind",
            ),
            (dict(compress_node_size=1), "compress_node_size=1, but .* with compress_node_size=None"),
        ):
            with pytest.raises(ValueError, match=words):
                train(replace(config, steps=9, resume=tmp_path / "whole", out=tmp_path / "new", **change))


def test_residuals_in_a_checkpoint_are_all_that_was_not_sent(tmp_path):
    """The mean of the ranks' residuals plus that of the mean, as stored, is what a state of two ranks lacks."""
    config = config_of("sign", dp=2, steps=3, checkpoint_every=3, out=tmp_path)
    train(config)
    stored = Checkpoint(newest_whole(tmp_path / "checkpoints"))

    def rank(world, config, text):
        state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
        for step in range(3):
            train_step(world, state, config, text, step)
        return list(stored_parts(state, gradient_comm(state.mesh)))

    parts = [
        part
        for own in minipar.run(rank, config, load_data(config)[0], world_size=2, timeout_s=20)
        for part in own
    ]
    assert len(parts) == 2 * 2 * 16, "two ranks, two residuals of 16 matrices: 7 a layer, embedding and head"
    for part in parts:
        assert torch.equal(stored.read(KIND, part.placement), part.tensor)
    assert {part.placement.name.split(" of ")[0] for part in parts} == {
        "data rank 0's residual", "data rank 1's residual", "residual_of_mean"
    }  # fmt: skip


# Refusals, before any rank starts ------------------------------------------------------------------------------------


REFUSED = [
    (dict(compress="sing"), "did you mean sign"),
    (dict(compress="topk", compress_fraction=1.5), "k would be 0, or above n"),
    (dict(compress="powersgd", compress_rank=0), "compress_rank=0 is out of range; use 1 or more"),
    (dict(compress="sign", compress_rank=2), "compress_rank=2 is for compress=powersgd, and compress=sign"),
    (dict(compress_warmup=3), "compress_warmup=3, and compress=none"),
    (dict(compress="onebit-adam", compress_warmup=0), "compress_warmup=0 is out of range; use 1 or more"),
    (dict(compress="sign", zero=2), "which zero=2 exists to avoid; use 0 or 1"),
    (dict(compress="onebit-adam", zero=1), "which zero=1 cuts; use zero=0"),
    (dict(compress="onebit-adam", optimizer="lamb"), "optimizer=lamb; use adamw"),
    (dict(compress="onebit-lamb"), "is a form of lamb, and optimizer=adamw; use lamb"),
    (dict(compress="onebit-lamb", optimizer="lamb", tp=2), "norms of whole layers, which tp=2 cuts"),
    (dict(compress="sign", on_nan="skip"), "never encodes nan or inf"),
    (dict(compress="int8", dtype="float16"), "never encodes nan or inf"),
    (dict(compress="diloco", compress_every=3, dtype="bfloat16"), "dtype=bfloat16 has masters; use float32"),
    (
        dict(compress="local-sgd"),
        "steps=6 is no multiple of compress_every=10.*use one, or compress_every=2, 3 or 6",
    ),
    (dict(compress="diloco", compress_every=3, checkpoint_every=2), "checkpoint_every=2 is no multiple"),
    (dict(compress="local-sgd", compress_every=3, cp=2), "cp=2 ranks compute one sample together"),
    (dict(compress="sign", compress_node_size=3, dp=4), "compress_node_size=3 does not divide"),
    (
        dict(compress="onebit-adam", pp=2, model=replace(SMALL, tie_embeddings=True)),
        "copies of the tied embedding would drift",
    ),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_does_not_fit_is_refused_in_words(options, words):
    with pytest.raises(ValueError, match=words):
        replace(BASE, **({"dp": 2} | options))


def test_exact_steps_are_compared_and_no_others():
    assert exact_steps(replace(BASE, dp=2)) == 6
    assert exact_steps(config_of("sign", dp=2)) == 0
    assert exact_steps(config_of("sign")) == 6
    assert exact_steps(config_of("onebit-adam", dp=2)) == 2
    assert exact_steps(config_of("zero-one-adam", dp=2)) == 0
    assert exact_steps(config_of("diloco")) == 1
    assert exact_steps(config_of("local-sgd")) == 6


def test_signs_with_a_scale_for_each_block_say_zero_where_a_block_is_zero():
    codec, x = Sign(4), torch.tensor([0.0, 0, 0, 0, 3, -1, 2, 2, 5])
    assert codec.num_bytes(9) == 2 + 4 * 3 == len(codec.encode(x))
    assert codec.decode(codec.encode(x), 9).tolist() == [0, 0, 0, 0, 2, -2, 2, 2, 5]
