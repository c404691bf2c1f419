"""Runs whose samples pass through the pipeline in slices: the numbers of one process on every mesh, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minipar.model import ModelConfig
from minipar.schedules.registry import SLICED
from minipar.train.legal_configs import legal_configs
from minipar.train.slicing import slice_sizes
from minipar.train.train_config import TrainConfig
from minipar.train.verification import table, verify
from tests.strategies import mesh_sizes

MODEL = ModelConfig(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=24, dropout=0.2)
BASE = TrainConfig(
    model=MODEL, schedule="seq1f1b", seq_slices=3, microbatches=2, batch_size=8, seq_len=24, steps=2, warmup=1,
    dtype="float64", timeout_s=10,
)  # fmt: skip

CHOSEN = {
    "one stage on a square of tp ranks": dict(tp=4, tp_layout="2d", zero=1, recompute="full"),
    "tied embeddings over tp and sequence_parallel, all recomputed": dict(
        pp=2, tp=2, sequence_parallel=True, tp_chunked=True, recompute="full",
        model=replace(MODEL, tie_embeddings=True),
    ),
    "experts, whose groups are not cut, on ep ranks": dict(
        pp=2, dp=2, ep=2, zero=2, schedule="terapipe",
        model=replace(MODEL, num_experts=4, top_k=2, group_tokens=4, moe_every=1),
    ),
    "parameters cut over dp, blocks recomputed two by two": dict(
        pp=2, dp=2, zero=3, recompute="every:2", model=replace(MODEL, num_layers=4)
    ),
    "one stage, documents, gradients reduced after every slice": dict(
        dp=2, zero=2, reduce_every="microbatch", model=replace(MODEL, documents=True, parallel_block=True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("chosen", CHOSEN)
def test_a_run_in_slices_has_the_numbers_of_one_process(chosen):
    result = verify(replace(BASE, **CHOSEN[chosen]))
    assert result.equal, table(result)


@st.composite
def configs(draw) -> TrainConfig:
    experts = draw(st.sampled_from([0, 0, 4]))
    model = ModelConfig(
        dim=16, num_layers=draw(st.integers(4, 5)), num_heads=4, max_seq_len=32,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])), tie_embeddings=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.2])), parallel_block=draw(st.booleans()), documents=draw(st.booleans()),
        attention=draw(st.sampled_from(["fused", "plain", "flash"])), num_experts=experts, top_k=min(2, experts) or 1,
        **({"group_tokens": draw(st.sampled_from([2, 3, 4]))} if experts else {}),
    )  # fmt: skip
    sizes = draw(mesh_sizes(8, axes=("pp", "dp", "tp", *(["ep"] if experts else []))))
    options = dict(
        schedule=draw(st.sampled_from(SLICED)), seq_slices=draw(st.integers(2, 5)), seq_len=draw(st.integers(12, 32)),
        zero=draw(st.integers(0, 3)), microbatches=draw(st.sampled_from([1, 2, 4])),
        sequence_parallel=draw(st.booleans()), offload_activations=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full", "every:2"])),
    )  # fmt: skip
    options["tp_chunked"] = options["sequence_parallel"] and draw(st.booleans())
    options["partition_activations"] = (
        options["recompute"] in ("full", "every:2")
        and not options["sequence_parallel"]
        and draw(st.booleans())
    )
    try:
        return replace(BASE, model=model, **sizes, **options)
    except ValueError:
        assume(False)


@pytest.mark.slow
@settings(max_examples=60)
@given(configs())
def test_any_run_in_slices_has_the_numbers_of_one_process(config):
    result = verify(config)
    assert result.equal, table(result)


@given(configs())
def test_every_slice_is_whole_groups_and_a_part_for_every_tp_rank(config):
    sizes = slice_sizes(config)
    assert len(sizes) == config.seq_slices
    assert sum(sizes) == config.seq_len
    assert min(sizes) > 0
    groups = config.model.group_tokens if config.model.num_experts else 1
    assert all(size % groups == 0 for size in sizes[:-1])
    assert all(size % config.tp == 0 for size in sizes if config.sequence_parallel)


def test_a_long_sample_is_cut_where_slices_take_equally_long():
    sizes = slice_sizes(replace(BASE, model=replace(MODEL, max_seq_len=8192), seq_len=8192, seq_slices=4))
    assert sum(sizes) == 8192
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(schedule="1f1b"), "seq_slices=3 with schedule='1f1b', .* use schedule=terapipe or seq1f1b"),
        (dict(cp=2), "seq_slices=3: .* and cp=2 spreads a sample over ranks; use one of the two"),
        (
            dict(seq_slices=25),
            "seq_slices=25 are more than the 24 parts of seq_len=24 of one token; use 24 or",
        ),
        (
            dict(seq_slices=13, tp=2, sequence_parallel=True),
            "seq_slices=13 are more than the 12 parts .* cuts over tp=2",
        ),
        (
            dict(model=replace(MODEL, num_experts=4)),
            r"3 are more than the 1 parts .* keep routing groups whole \(group_tokens=None\); use 1 or fewer",
        ),
        (dict(compile="eager"), "seq_slices=3 changes .* use compile=none"),
        (dict(seq_slices=0), "seq_slices=0 is out of range; use 1 or more"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_a_rank_starts(wrong, says):
    with pytest.raises(ValueError, match=says) as refusal:
        replace(BASE, **wrong)
    assert "\n" not in str(refusal.value)


def test_the_sweep_cuts_samples_wherever_the_schedule_does():
    for asked, cut in ((1, 2), (3, 3)):
        base = replace(BASE, seq_slices=asked, model=replace(MODEL, num_layers=4))
        swept = list(legal_configs(base, 2))
        assert {c.schedule for c in swept if c.seq_slices == cut} == set(SLICED)
        assert {c.seq_slices for c in swept if c.schedule not in SLICED} == {1}
