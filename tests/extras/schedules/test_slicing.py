"""Runs whose samples pass through the pipeline in slices: the numbers of one process on every mesh, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.extras.schedules.slicing import slice_sizes
from minipar.train.verification.legal_configs import legal_configs
from minipar.train.verification.verify import table, verify

MODEL = ModelConfig(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=24, dropout=0.2)
BASE = TrainConfig(
    model=MODEL, schedule="seq1f1b", options={"schedule": {"slices": 3}}, microbatches=2, batch_size=8, seq_len=24,
    steps=2, warmup=1, dtype="float64",
)  # fmt: skip


def in_slices(slices: int) -> tuple[str, dict]:
    return "seq1f1b", {"slices": slices}


CHOSEN = {
    "one stage on a square of tp ranks": dict(tp=4, tp_layout="2d", zero=1, recompute="full"),
    "heads over tp": dict(pp=2, tp=2),
    "tied embeddings over tp and sequence_parallel, all recomputed": dict(
        pp=2, tp=2, sequence_parallel=True, tp_chunked=True, recompute="full",
        model=replace(MODEL, tie_embeddings=True),
    ),
    "experts, whose groups are not cut, on ep ranks": dict(
        pp=2, dp=2, ep=2, zero=2,
        model=replace(MODEL, num_experts=4, top_k=2, group_tokens=4, moe_every=1),
    ),
    "parameters cut over dp, blocks recomputed two by two": dict(
        pp=2, dp=2, zero=3, recompute="every:2", model=replace(MODEL, num_layers=4)
    ),
    "one stage, documents, gradients reduced after every slice": dict(
        dp=2, zero=2, reduce_every="microbatch", model=replace(MODEL, documents=True, parallel_block=True)
    ),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("chosen", CHOSEN)
def test_a_run_in_slices_has_the_numbers_of_one_process(chosen):
    result = verify(BASE.choosing(**CHOSEN[chosen]))
    assert result.equal, table(result)


@given(
    st.integers(2, 5),
    st.integers(20, 32),
    st.sampled_from([0, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_every_slice_is_whole_groups_and_a_part_for_every_tp_rank(
    slices, seq_len, groups, tp, sequence_parallel
):
    experts = dict(num_experts=4, group_tokens=groups) if groups else {}
    try:
        config = BASE.choosing(
            model=replace(MODEL, num_kv_heads=4, max_seq_len=32, **experts), schedule=in_slices(slices),
            seq_len=seq_len, pp=2, tp=tp, sequence_parallel=sequence_parallel,
        )  # fmt: skip
    except ValueError:
        assume(False)
    sizes = slice_sizes(config)
    assert len(sizes) == slices
    assert sum(sizes) == seq_len
    assert min(sizes) > 0
    assert all(size % (groups or 1) == 0 for size in sizes[:-1])
    assert all(size % tp == 0 for size in sizes if sequence_parallel)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(cp=2), "schedule.slices=3: .* and cp=2 spreads a sample over ranks; use one of the two"),
        (
            dict(schedule=in_slices(25)),
            "schedule.slices=25 are more than the 24 parts of seq_len=24 of one token; use 24 or",
        ),
        (
            dict(schedule=in_slices(13), tp=2, sequence_parallel=True),
            "schedule.slices=13 are more than the 12 parts .* cuts over tp=2",
        ),
        (
            dict(model=replace(MODEL, num_experts=4)),
            r"3 are more than the 1 parts .* keep routing groups whole \(group_tokens=None\); use 1 or fewer",
        ),
        (dict(compile="eager"), "schedule.slices=3 changes .* use compile=none"),
        (dict(schedule=in_slices(1)), "schedule.slices=1 cuts no sample; use 2 or more, or schedule=1f1b"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_a_rank_starts(wrong, says):
    with pytest.raises(ValueError, match=says) as refusal:
        BASE.choosing(**wrong)
    assert "\n" not in str(refusal.value)


def test_the_sweep_cuts_samples_wherever_the_schedule_does():
    whole = BASE.choosing(schedule="1f1b", model=replace(MODEL, num_layers=4))
    for base, cut in ((whole, 2), (whole.choosing(schedule=in_slices(3)), 3)):
        swept = list(legal_configs(base, 2))
        slices = {(c.schedule, getattr(c.options.get("schedule"), "slices", 1)) for c in swept if c.pp > 1}
        assert {name for name, number in slices if number == cut} == {"seq1f1b"}
        assert {number for name, number in slices if name != "seq1f1b"} == {1}
