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
from tests.examples import examples
from tests.strategies import mesh_sizes

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
        schedule=in_slices(draw(st.integers(2, 5))),
        seq_len=draw(st.integers(12, 32)),
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
        return BASE.choosing(model=model, **sizes, **options)
    except ValueError:
        assume(False)


@pytest.mark.slow
@examples(60)
@given(configs())
def test_any_run_in_slices_has_the_numbers_of_one_process(config):
    result = verify(config)
    assert result.equal, table(result)


@given(configs())
def test_every_slice_is_whole_groups_and_a_part_for_every_tp_rank(config):
    sizes = slice_sizes(config)
    assert len(sizes) == config.options["schedule"].slices
    assert sum(sizes) == config.seq_len
    assert min(sizes) > 0
    groups = config.model.group_tokens if config.model.num_experts else 1
    assert all(size % groups == 0 for size in sizes[:-1])
    assert all(size % config.tp == 0 for size in sizes if config.sequence_parallel)


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
