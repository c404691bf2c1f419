"""Runs whose pipeline goes in two directions: the numbers of one process on every mesh, and what is refused."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.learn.museum.mesh_faults import copies_keep_their_own_gradients
from minipar.train.trainer import train
from minipar.verification.verify import table, verify
from tests.examples import examples
from tests.strategies import mesh_sizes

MODEL = ModelConfig(dim=16, num_layers=4, num_heads=4, num_kv_heads=2, max_seq_len=16, dropout=0.2)
BASE = TrainConfig(
    model=MODEL, pp=2, schedule="chimera", microbatches=2, batch_size=8, seq_len=16, steps=2, warmup=1,
    dtype="float64",
)  # fmt: skip
EXPERTS = dict(num_experts=4, top_k=2, group_tokens=4, moe_every=1)

CHOSEN = {
    "tied embeddings, whose ends each rank holds both of, cut over both copies": dict(
        schedule="dualpipe", zero=3, model=replace(MODEL, tie_embeddings=True)
    ),
    "experts on ep ranks, and biases from the loads of both copies": dict(
        dp=2, ep=2, zero=2, model=replace(MODEL, **EXPERTS, balance_bias=True)
    ),
    "LAMB, whose norms are sums over both copies' shards": dict(
        pp=4, schedule="dualpipe", zero=1, optimizer="lamb", model=replace(MODEL, tie_embeddings=True)
    ),
    "shards inside each of two groups of both copies' ranks": dict(dp=2, zero=3, replicate=2),
    "tp ranks, and blocks recomputed": dict(tp=2, sequence_parallel=True, recompute="full", zero=2),
}  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize("chosen", CHOSEN)
def test_a_run_in_two_directions_has_the_numbers_of_one_process(chosen):
    result = verify(replace(BASE, **CHOSEN[chosen]))
    assert result.equal, table(result)


@st.composite
def configs(draw) -> TrainConfig:
    experts = draw(st.sampled_from([{}, {}, EXPERTS]))
    model = replace(
        MODEL, tie_embeddings=draw(st.booleans()), dropout=draw(st.sampled_from([0.0, 0.2])),
        parallel_block=draw(st.booleans()), documents=draw(st.booleans()),
        balance_bias=bool(experts) and draw(st.booleans()), **experts,
    )  # fmt: skip
    sizes = draw(mesh_sizes(4, axes=("dp", "cp", "tp", *(["ep"] if experts else []))))
    options = dict(
        schedule=draw(st.sampled_from(["chimera", "dualpipe"])), pp=draw(st.sampled_from([2, 2, 4])),
        zero=draw(st.integers(0, 3)), microbatches=draw(st.sampled_from([2, 4])),
        sequence_parallel=draw(st.booleans()), recompute=draw(st.sampled_from(["none", "selective", "full"])),
        optimizer=draw(st.sampled_from(["adamw", "lamb", "muon"])), bucket_mb=draw(st.sampled_from([1.0, 0.001])),
    )  # fmt: skip
    options["offload"] = draw(st.sampled_from(["none", "cpu"])) if options["zero"] else "none"
    options["replicate"] = draw(st.sampled_from([1, 2])) if options["zero"] == 3 else 1
    try:
        config = replace(BASE, model=model, **{**sizes, **options})
    except ValueError:
        assume(False)
    assume(config.world_size <= 8)
    return config


@pytest.mark.thorough
@examples(5)
@given(configs())
def test_a_drawn_run_in_two_directions_has_the_numbers_of_one_process(config):
    result = verify(config)
    assert result.equal, table(result)


@pytest.mark.slow
@examples(60)
@given(configs())
def test_any_run_in_two_directions_has_the_numbers_of_one_process(config):
    result = verify(config)
    assert result.equal, table(result)


def _each_copy_by_itself(world, config, text):
    with ExitStack() as changes:
        copies_keep_their_own_gradients(world, lambda *what: changes.enter_context(patch.object(*what)))
        return import_module("minipar.verification.verify")._observe_rank(world, config, text)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("zero", range(4))
def test_copies_that_do_not_share_their_gradients_are_found(zero, monkeypatch):
    monkeypatch.setattr(import_module("minipar.verification.verify"), "_observe_rank", _each_copy_by_itself)
    result = verify(replace(BASE, zero=zero))
    assert not result.equal
    assert "gradients, step 0" in table(result)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["sign", "powersgd", pytest.param("topk", marks=pytest.mark.slow)])
def test_a_stopped_run_whose_stages_compress_goes_on_to_the_same_losses_and_is_saved_again(method, tmp_path):
    config = replace(
        BASE, compress=method, steps=4, checkpoint_every=2, verify_steps=0, keep=0, out=tmp_path / "whole"
    )
    whole = [line["loss"] for line in train(config).metrics]
    shutil.rmtree(tmp_path / "whole" / "checkpoints" / "step-00000004")
    again = train(replace(config, resume=tmp_path / "whole", out=tmp_path / "again"))
    assert [line["loss"] for line in again.metrics] == whole[2:]
    assert (tmp_path / "again" / "checkpoints" / "step-00000004").is_dir()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(pp=3), "p=3 ranks in two directions: half of them go each way; use an even number, such as 4"),
        (dict(microbatches=1), "m=1 microbatches in two directions: .* such as 2"),
        (dict(pp=6), "has 6 stages, and num_layers=4; use at most 4 stages"),
        (dict(chunks=2), "chunks=2 stages a rank with schedule='chimera', which has 1"),
        (dict(zero=2, reduce_every="microbatch"), "has several stages on a rank; use reduce_every=step"),
        (dict(zero=3, replicate=3), r"replicate=3 does not divide dp\*cp\*2=2"),
        (dict(dp=2, compress="diloco"), "compress=diloco: the two copies of the model .* such as dualpipe-v"),
    ],
)
def test_what_cannot_go_both_ways_is_refused_before_a_rank_starts(wrong, says):
    with pytest.raises(ValueError, match=says) as refusal:
        replace(BASE, **wrong)
    assert "\n" not in str(refusal.value)
