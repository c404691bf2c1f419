"""What a step reports: operations as torch counts them, routing as one process sees it, and steps that are no numbers."""

import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import minipar
from minipar.config.check_paths import CHECKPOINTS
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh
from minipar.model import Transformer
from minipar.train import train
from minipar.train.checkpoint.restore import find_damage
from minipar.train.data.text import load_text
from minipar.train.log import MetricsLog, read_metrics
from minipar.train.metrics import flops_per_token, speed
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step
from tests.examples import examples

SMALL = dict(dim=16, num_layers=4, num_heads=4, max_seq_len=32)
RUN = dict(batch_size=8, seq_len=32, steps=4, warmup=1, dtype="float64", verify_steps=0, trace_steps=0)


@examples(8)
@given(
    num_layers=st.integers(1, 3),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    hidden_dim=st.sampled_from([8, 40]),
    tie_embeddings=st.booleans(),
    head_dim=st.sampled_from([None, 6]),
    seq_len=st.sampled_from([8, 32]),
)
def test_the_formula_is_what_torch_counts(seq_len, **sizes):
    config = ModelConfig(dim=16, num_heads=4, max_seq_len=32, attention="plain", **sizes)
    tokens = torch.randint(0, 256, (2, seq_len))
    with FlopCounterMode(display=False) as counter:
        model = Transformer(config)
        model.loss(tokens, tokens).backward()
    assert counter.get_total_flops() == 2 * seq_len * flops_per_token(config, seq_len)


def test_latent_attentions_value_padding_is_not_counted_as_work():
    """torch counts the padding of v by rope_dim zeros in each head, which is no useful work."""
    config = ModelConfig(**SMALL, attention="plain", kv_latent_dim=6, rope_dim=2)
    tokens = torch.randint(0, 256, (2, 8))
    with FlopCounterMode(display=False) as counter:
        Transformer(config).loss(tokens, tokens).backward()
    padding = 6 * config.num_layers * 8 * config.num_heads * config.rope_dim
    assert counter.get_total_flops() == 2 * 8 * (flops_per_token(config, 8) + padding)


def test_only_the_experts_a_token_is_sent_to_count():
    dense = ModelConfig(**SMALL)
    sparse = ModelConfig(**SMALL, num_experts=8, top_k=2, moe_every=2)
    router, mlp = 16 * 8, 3 * 16 * dense.hidden_dim
    assert flops_per_token(sparse, 32) - flops_per_token(dense, 32) == 6 * 2 * (router + mlp)


NAMES = ("balance_loss", "z_loss", "drop_rate", "unserved", "router_entropy", "imbalance")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh",
    [
        dict(dp=4, ep=4),
        dict(pp=2, tp=2, microbatches=2),
        dict(dp=2, tp=2, recompute="full"),
        dict(cp=2, zero=3),
    ],
    ids=str,
)
def test_routing_is_reported_alike_on_every_mesh(tmp_path, mesh):
    model = ModelConfig(**SMALL, num_experts=4, top_k=2, capacity_factor=0.75, group_tokens=4)
    run = TrainConfig(model=model, out=tmp_path, **RUN)
    want = train(run).metrics
    assert 0 < want[0]["drop_rate"] < 1
    assert want[0]["imbalance"] > 1
    for got, line in zip(train(TrainConfig(model=model, out=tmp_path, **RUN, **mesh)).metrics, want):
        for name in NAMES:
            assert got[name] == pytest.approx(line[name], rel=1e-9), name


@pytest.mark.parametrize(
    ("mode", "again"), [("selective", "core"), ("full", "layers"), ("every:2", "layers")]
)
def test_what_is_computed_again_is_in_hfu_and_not_in_mfu(mode, again):
    model, T = ModelConfig(**SMALL), 32
    run = TrainConfig(model=model, seq_len=T, recompute=mode, peak_tflops=1.0)
    head, core = 2 * model.dim * model.vocab_size, 4 * model.num_layers * model.dim * T
    forward = flops_per_token(model, T) / 3
    extra = {"core": core, "layers": forward - head}[again]
    line = speed(run, 1.0)
    assert line["hfu"] / line["mfu"] == pytest.approx(1 + extra / (3 * forward), rel=1e-12)
    assert line["mfu"] == speed(TrainConfig(model=model, seq_len=T, peak_tflops=1.0), 1.0)["mfu"]


@pytest.mark.thorough
def test_the_rate_of_work_is_stated_against_the_peak_if_that_is_known(tmp_path):
    run = dict(model=ModelConfig(**SMALL), out=tmp_path, **RUN | dict(steps=1))
    (line,) = train(TrainConfig(dp=2, peak_tflops=2.0, **run)).metrics
    work = flops_per_token(ModelConfig(**SMALL), 32) * 8 * 32
    assert line["tflops"] == pytest.approx(work / line["seconds"] / 2 / 1e12)
    # Divided in another order, so equal to rounding only.
    assert line["mfu"] == line["hfu"] == pytest.approx(line["tflops"] / 2, rel=1e-12)
    assert "mfu" not in train(TrainConfig(**run)).metrics[0]


def test_seconds_of_waiting_for_data_are_seconds_of_the_step():
    config = TrainConfig(model=ModelConfig(**SMALL), **RUN)

    def rank(world):
        state = parallelize(config, Mesh(world), world.device)
        return train_step(world, state, config, load_text(None), 0, data_wait_s=1000.0)

    (line,) = minipar.run(rank, world_size=1)
    assert line["data_wait_s"] == 1000
    assert line["seconds"] > 1000
    assert line["tokens_per_s"] == pytest.approx(config.batch_size * config.seq_len / line["seconds"])


# Steps that are no numbers ------------------------------------------------------------------------------------------


def explode(config, at: int):
    """The training step of this run, but that in step `at` one rank's loss is not a number."""
    from minipar.train import step as steps
    from minipar.train import trainer

    plain = steps.train_step

    def broken(world, state, config, text, step, batch, data_wait_s):
        def poison():
            if step == at and world.rank == world.size - 1:
                state.optimizer.tensors[0].grad.fill_(float("nan"))

        return plain(world, state, config, text, step, poison, batch, data_wait_s)

    def rank(world, text):
        trainer.train_step = broken
        try:
            return trainer.train_rank(world, config, text, report=lambda line: None)
        finally:
            trainer.train_step = plain

    return minipar.run(rank, load_text(None), world_size=config.world_size)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", [dict(dp=2), dict(dp=2, zero=2), dict(pp=2, microbatches=2)], ids=str)
def test_a_non_finite_step_is_skipped_on_all_ranks_and_counted(tmp_path, mesh):
    run = TrainConfig(model=ModelConfig(**SMALL), out=tmp_path, on_nan="skip", **RUN, **mesh)
    metrics = explode(run, at=1).metrics
    assert [line["skipped"] for line in metrics] == [0, 1, 0, 0]
    assert metrics[1]["grad_norm"] != metrics[1]["grad_norm"]
    plain = train(run).metrics
    assert metrics[1]["loss"] == plain[1]["loss"]
    assert metrics[2]["loss"] != pytest.approx(plain[2]["loss"], rel=1e-9)  # that update is missing
    assert metrics[3]["loss"] == metrics[3]["loss"]


def test_or_it_stops_the_run_with_what_was_seen(tmp_path):
    run = TrainConfig(model=ModelConfig(**SMALL), out=tmp_path, dp=2, checkpoint_every=1, **RUN)
    with pytest.raises(minipar.RankError, match=r"step 2: the loss is .* and the gradient norm nan"):
        explode(run, at=2)


def test_a_stopping_step_completes_the_checkpoint_in_progress(tmp_path):
    run = TrainConfig(model=ModelConfig(**SMALL), out=tmp_path, dp=2, checkpoint_every=2, **RUN)
    with pytest.raises(minipar.RankError, match=r"step 2: the loss is .* and the gradient norm nan"):
        explode(run, at=2)
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["step-00000002"]
    assert find_damage(tmp_path / CHECKPOINTS / "step-00000002") is None


# Where they are written ---------------------------------------------------------------------------------------------


def test_metrics_are_readable_at_once_and_half_lines_ignored(tmp_path):
    log = MetricsLog(tmp_path)
    for step in range(3):
        log({"step": step, "loss": 0.5})
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    again = MetricsLog(tmp_path, begin=2)
    again({"step": 2, "loss": 0.25})
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 0, "loss": 0.5}, {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]


@pytest.mark.thorough
def test_tensorboard_reads_the_same_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = TrainConfig(model=ModelConfig(**SMALL), out=tmp_path, dp=2, tensorboard=True, eval_every=2, **RUN)
    metrics = train(run).metrics
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([line["loss"] for line in metrics])
    assert [e.step for e in events.Scalars("eval_loss")] == [1, 3]


def test_tensorboard_shows_the_steps_of_a_resumed_run_once(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for second, (begin, end, loss) in enumerate([(0, 6, 0.5), (4, 5, 0.25)]):
        now = time.time() + second  # it names the files, which are read in order
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda now=now: now)
            log = MetricsLog(tmp_path, tensorboard=True, begin=begin)
        for step in range(begin, end):
            log({"step": step, "loss": loss})
        log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    seen = [(e.step, e.value) for e in events.Scalars("loss")]
    assert seen == [(line["step"], line["loss"]) for line in read_metrics(tmp_path)]
    assert seen == [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.5), (4, 0.25)]


def test_tensorboard_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        train(TrainConfig(model=ModelConfig(**SMALL), out=tmp_path, tensorboard=True, **RUN))


# Loss on text that is not trained on ----------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "mesh",
    [dict(dp=2, pp=2, tp=2, microbatches=2), dict(cp=2, zero=3), dict(pp=2, schedule="zb-v", microbatches=4)],
    ids=str,
)
def test_validation_loss_matches_one_process_sparing_training(tmp_path, mesh):
    model = ModelConfig(**SMALL, dropout=0.2, tie_embeddings=True)
    run = dict(model=model, out=tmp_path, eval_every=2, **RUN)
    want, got = train(TrainConfig(**run)).metrics, train(TrainConfig(**run, **mesh)).metrics
    for a, b in zip(got, want):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-10)
        if "eval_loss" in b:
            assert a["eval_loss"] == pytest.approx(b["eval_loss"], rel=1e-10)
    assert [line["step"] for line in want if "eval_loss" in line] == [1, 3]
    rare = train(TrainConfig(**run | dict(eval_every=4))).metrics
    assert [line["loss"] for line in rare] == [line["loss"] for line in want]
    assert rare[3]["eval_loss"] == want[3]["eval_loss"]
