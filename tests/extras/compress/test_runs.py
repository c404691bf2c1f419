"""`--compress` in whole runs: every method on meshes, what equality means, what resumes, what is refused in words."""

from dataclasses import replace

import pytest
import torch

import minipar
from minipar.config.choices import AVERAGINGS
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.extras.compress import CompressedMean, Sign
from minipar.extras.compress.choices import Method
from minipar.extras.compress.lossy_reference import lossy_rows
from minipar.extras.compress.run_state import KIND
from minipar.mesh import Mesh, placement_of
from minipar.train import train
from minipar.train.checkpoint.restore import Checkpoint, newest_whole
from minipar.train.data.text import load_data
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step
from minipar.train.verification.verify import _observe_rank, table, verify

SMALL = ModelConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=2, max_seq_len=16)
BASE = TrainConfig(model=SMALL, batch_size=4, seq_len=16, steps=6, warmup=2, verify_steps=0, trace_steps=0)
OPTIONS = {
    "onebit-adam": dict(warmup=2),
    "zero-one-adam": dict(warmup=2, every=3),
    "onebit-lamb": dict(warmup=2),
    "diloco": dict(every=3, warmup=1),
}
METHODS = {name: method for name, method in AVERAGINGS.usable().items() if isinstance(method, Method)}


def config_of(method: str, options: dict | None = None, **more) -> TrainConfig:
    if method == "onebit-lamb":
        more |= dict(optimizer="lamb", lr=0.05)
    return BASE.choosing(compress=(method, OPTIONS.get(method, {}) | (options or {})), **more)


def exact_steps(config: TrainConfig) -> int:
    return config.choice("compress").exact_steps(config)


def run_all(world, configs, text):
    """Of each run: the losses, and whether ranks with the same part of a parameter have the same bits."""
    found = []
    for config in configs:
        state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
        losses = [train_step(world, state, config, text, step)["loss"] for step in range(config.steps)]
        params = [p for stage in state.stages for p in stage.parameters()]
        found.append((losses, [(placement_of(p).part, p.detach()) for p in params]))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 4}])
def test_every_method_ends_on_equal_replicas_of_every_mesh(mesh):
    configs = []
    for method in METHODS:
        if method == "onebit-lamb" and "tp" in mesh:
            continue
        configs.append(config_of(method, **mesh))
    plain = replace(BASE, **mesh)
    ranks = minipar.run(run_all, [plain, *configs], load_data(BASE)[0], world_size=4)
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
    dict(compress=("topk", {"fraction": 1.0}), dp=2, tp=2),
    dict(compress=("powersgd", {"rank": 16}), dp=2, pp=2, zero=1),
    dict(compress=("topk", {"fraction": 1.0}), dp=2, pp=2, zero=3, microbatches=2),
    dict(compress="sign", tp=2),
    dict(compress=("onebit-adam", {"warmup": 2}), dp=2, tp=2),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", EXACT, ids=str)
def test_what_loses_nothing_has_the_numbers_of_one_process(options):
    result = verify(BASE.choosing(steps=2, dtype="float64", **options))
    assert result.equal, result.first_divergence


def turned(self, tensors):
    """Read every tensor backwards."""
    return kept_means(self, {p: x.flip(0) for p, x in tensors.items()})


def forgotten_residual(self, tensors):
    """Forget what was not sent, though feedback is on."""
    self.worker.clear()
    return kept_means(self, tensors)


def own_gradient(self, tensors):
    """Keep this rank's own gradient in place of the mean."""
    kept_means(self, tensors)
    return dict(tensors)


kept_means = CompressedMean.means


FAULTS = {
    kept_means: None,
    turned: "averages, step 0",
    forgotten_residual: "averages, step 1",
    own_gradient: "averages, step 0",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_of_a_compressed_mean_are_noticed(zero, fault):
    def faulty(world, config, text, fault):
        CompressedMean.means = fault
        try:
            return _observe_rank(world, config, text)
        finally:
            CompressedMean.means = kept_means

    config = config_of("int8", dp=2, zero=zero, steps=2, dtype="float64", batch_size=2)
    text = load_data(config)[0]
    rows = lossy_rows(config, text, minipar.run(faulty, config, text, fault, world_size=2))
    assert next((row.what for row in rows if not row.equal), None) == FAULTS[fault]


def test_a_warm_up_is_uncompressed_to_the_bit():
    configs = [replace(BASE, dp=2), config_of("sign", {"warmup": BASE.steps}, dp=2)]
    (plain, warm) = minipar.run(run_all, configs, load_data(BASE)[0], world_size=2)[0]
    assert plain[0] == warm[0]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(plain[1], warm[1]))


EXPERTS = replace(SMALL, num_experts=4, top_k=2, group_tokens=4)
LOSSY = [
    dict(compress=("sign", {"warmup": 1}), dp=2, tp=2),
    dict(compress="int8", dp=4, zero=1),
    dict(compress="fp8", dp=2, cp=2, ep=2, model=EXPERTS),
    dict(compress=("topk", {"fraction": 0.2}), dp=2, pp=2, model=replace(SMALL, tie_embeddings=True)),
    dict(compress="tagc", cp=2, pp=2, zero=1, model=replace(SMALL, tie_embeddings=True)),
    dict(compress=("powersgd", {"rank": 1}), dp=2, tp=2, optimizer="lamb"),
    dict(compress="int8", dp=3, batch_size=6, zero=2, model=replace(SMALL, tie_embeddings=True)),
    dict(compress=("sign", {"warmup": 1}), dp=2, tp=2, zero=2),
    dict(compress="fp8", dp=2, cp=2, ep=2, zero=2, model=EXPERTS),
    dict(
        compress=("topk", {"fraction": 0.2}),
        dp=2,
        pp=2,
        zero=2,
        microbatches=2,
        model=replace(SMALL, tie_embeddings=True),
    ),
    dict(compress="tagc", dp=2, zero=2, optimizer="muon"),
    dict(compress="int8", dp=3, batch_size=6, zero=3),
    dict(compress="powersgd", dp=2, tp=2, zero=2),
    dict(compress=("powersgd", {"rank": 2}), dp=3, batch_size=6, zero=3),
    dict(compress=("sign", {"warmup": 1}), dp=2, tp=2, zero=3, microbatches=2, offload="cpu"),
    dict(compress=("topk", {"fraction": 0.2}), dp=2, pp=2, zero=3, model=replace(SMALL, tie_embeddings=True)),
    dict(compress="fp8", dp=2, cp=2, ep=2, zero=3, model=EXPERTS, recompute="full"),
    dict(compress="int8", dp=2, zero=3, dtype="bfloat16"),
    dict(compress="fp8", dp=2, dtype="bfloat16", reduce_dtype="float64"),
]


@pytest.mark.sampled(48)
@pytest.mark.parametrize("options", LOSSY, ids=lambda options: str(options["compress"]))
def test_what_is_lossy_has_the_numbers_of_its_form_in_one_process(options):
    result = verify(BASE.choosing(**dict(steps=3, dtype="float64") | options))
    assert result.equal, table(result)


def test_each_part_of_a_lossy_step_is_compared():
    """A rank's gradient, what it gave to the compressor, its weights: each is changed in the second step."""
    config = config_of("sign", dp=2, steps=2, dtype="float64", batch_size=2)
    text = load_data(config)[0]
    seen = minipar.run(_observe_rank, config, text, world_size=2)
    places = {
        "gradients, step 1": seen[1].messages[1][-1].given[0],
        "averages, step 1": seen[1].snapshots["gradients, step 1"][0][1],
        "weights, step 1": seen[1].snapshots["weights, step 1"][0][1],
    }
    assert all(row.equal for row in lossy_rows(config, text, seen))
    for want, tensor in places.items():
        kept = tensor.clone()
        tensor.mul_(1.01)
        assert next(row.what for row in lossy_rows(config, text, seen) if not row.equal) == want
        tensor.copy_(kept)


def test_methods_that_average_no_gradients_are_verified_in_warm_up():
    for method, most in (("onebit-adam", 2), ("zero-one-adam", 0), ("onebit-lamb", 2), ("diloco", 1)):
        assert exact_steps(config_of(method, dp=2)) == most
        with pytest.raises(ValueError, match=f"compress={method} is lossy.* after its first {most} steps"):
            verify(config_of(method, dp=2))


def test_local_steps_have_the_same_losses_on_every_mesh():
    losses = []
    for mesh in ({"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}):
        config = config_of("diloco", dtype="float64", **mesh)
        ranks = minipar.run(run_all, [config], load_data(BASE)[0], world_size=config.world_size)
        losses.append(ranks[0][0][0])
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-9)] * 2


# Resuming -----------------------------------------------------------------------------------------------------------


def losses_of(config) -> list[float]:
    return [line["loss"] for line in train(config).metrics]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method",
    ["sign", "zero-one-adam", "diloco", "int8 under zero 2", "int8 under zero 3"]
    + [
        pytest.param(m, marks=pytest.mark.slow)
        for m in METHODS
        if m not in ("sign", "zero-one-adam", "diloco")
    ],
)
def test_a_stopped_run_resumes_to_the_losses_of_an_unbroken_one(method, tmp_path):
    method, _, under = method.partition(" under ")
    config = config_of(
        method, dp=2, out=tmp_path / "whole", checkpoint_every=3, keep=0, zero=int(under[-1:] or 0)
    )
    whole = losses_of(config)
    (tmp_path / "whole" / "checkpoints" / "step-00000006").rename(tmp_path / "last")
    assert losses_of(replace(config, resume=tmp_path / "whole", out=tmp_path / "whole")) == whole[3:]
    if under:  # with whole messages again, which have another error, of the mean
        (tmp_path / "whole" / "checkpoints" / "step-00000006").rename(tmp_path / "again")
        other = replace(config, zero=1, resume=tmp_path / "whole", out=tmp_path / "whole")
        assert losses_of(other) == pytest.approx(whole[3:], rel=0.01)
    if method == "sign":
        (tmp_path / "whole" / "checkpoints" / "step-00000006").rename(tmp_path / "again")
        other = replace(config, dp=4, resume=tmp_path / "whole", out=tmp_path / "whole")
        assert losses_of(other) == pytest.approx(whole[3:], rel=0.01), "on another number of replicas"
        words = "compress=none, but .* of a run with compress=sign, whose state is of another kind"
        with pytest.raises(ValueError, match=words):
            train(config.choosing(steps=9, resume=tmp_path / "whole", out=tmp_path / "new", compress="none"))
    if method == "powersgd":
        other = config_of(method, {"rank": 2}, dp=2, steps=9, resume=tmp_path / "whole", out=tmp_path / "new")
        with pytest.raises(ValueError, match="compress.rank=2, but .* with compress.rank=4"):
            train(other)


def test_residuals_in_a_checkpoint_are_all_that_was_not_sent(tmp_path):
    """The mean of the ranks' residuals plus that of the mean, as stored, is what a state of two ranks lacks."""
    config = config_of("sign", dp=2, steps=3, checkpoint_every=3, out=tmp_path)
    train(config)
    stored = Checkpoint(newest_whole(tmp_path / "checkpoints"))

    def rank(world, config, text):
        state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
        for step in range(3):
            train_step(world, state, config, text, step)
        return list(state.averaging.stored_parts(state))

    parts = [part for own in minipar.run(rank, config, load_data(config)[0], world_size=2) for part in own]
    assert len(parts) == 2 * 2 * 16, "two ranks, two residuals of 16 matrices: 7 a layer, embedding and head"
    for part in parts:
        assert torch.equal(stored.read(KIND, part.placement), part.tensor)
    assert {part.placement.name.split(" of ")[0] for part in parts} == {
        "data rank 0's residual", "data rank 1's residual", "residual_of_mean"
    }  # fmt: skip


# Refusals, before any rank starts ------------------------------------------------------------------------------------


REFUSED = [
    (dict(compress="sing"), "did you mean sign"),
    (dict(compress=("topk", {"fraction": 1.5})), "k would be 0, or above n"),
    (dict(compress=("powersgd", {"rank": 0})), "compress.rank=0 is out of range; use 1 or more"),
    (
        dict(compress=("sign", {"rank": 2})),
        "compress.rank is no option; use compress.warmup",
    ),
    (dict(options={"compress": {"warmup": 3}}), "compress.warmup: compress=none has no options"),
    (dict(compress=("onebit-adam", {"warmup": 0})), "compress.warmup=0 is out of range; use 1 or more"),
    (
        dict(compress="sign", zero=3, dp=4, replicate=2),
        "replaces the reduce-scatter, and replicate=2 adds an all-reduce .* use replicate=1",
    ),
    (
        dict(compress="int8", zero=2, reduce_every="microbatch"),
        "would round every microbatch; use reduce_every=step",
    ),
    (dict(compress="onebit-adam", zero=1), "which zero=1 cuts; use zero=0"),
    (dict(compress="onebit-adam", optimizer="lamb"), "optimizer=lamb; use adamw"),
    (dict(compress="onebit-lamb"), "is a form of lamb, and optimizer=adamw; use lamb"),
    (dict(compress="onebit-lamb", optimizer="lamb", tp=2), "norms of whole layers, which tp=2 cuts"),
    (dict(compress="sign", on_nan="skip"), "never encodes nan or inf"),
    (dict(compress="int8", dtype="float16"), "never encodes nan or inf"),
    (dict(compress=("diloco", {"every": 3}), dtype="bfloat16"), "dtype=bfloat16 has masters; use float32"),
    (
        dict(compress="diloco"),
        "steps=6 is no multiple of compress.every=10.*use one, or compress.every=2, 3 or 6",
    ),
    (dict(compress=("diloco", {"every": 3}), checkpoint_every=2), "checkpoint_every=2 is no multiple"),
    (dict(compress=("diloco", {"every": 3}), cp=2), "cp=2 ranks compute one sample together"),
    (
        dict(compress="onebit-adam", pp=2, model=replace(SMALL, tie_embeddings=True)),
        "copies of the tied embedding would drift",
    ),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_does_not_fit_is_refused_in_words(options, words):
    with pytest.raises(ValueError, match=words):
        BASE.choosing(**({"dp": 2} | options))


def test_exact_steps_are_compared_and_no_others():
    assert exact_steps(replace(BASE, dp=2)) == 6
    assert exact_steps(config_of("sign", dp=2)) == 0
    assert exact_steps(config_of("sign")) == 6
    assert exact_steps(config_of("onebit-adam", dp=2)) == 2
    assert exact_steps(config_of("zero-one-adam", dp=2)) == 0
    assert exact_steps(config_of("diloco")) == 1


def test_signs_with_block_scales_decode_zero_blocks_as_zero():
    codec, x = Sign(4), torch.tensor([0.0, 0, 0, 0, 3, -1, 2, 2, 5])
    assert codec.num_bytes(9) == 2 + 4 * 3 == len(codec.encode(x))
    assert codec.decode(codec.encode(x), 9).tolist() == [0, 0, 0, 0, 2, -2, 2, 2, 5]
