"""One legality: the planner calls a layout illegal exactly where the trainer refuses it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.config.rules import TENSOR, View, broken
from minipar.config.train_config import TrainConfig
from minipar.cost.layout import Implementation, Job, Layout, why_illegal, why_not_priced
from minipar.cost.machines import MACHINES
from minipar.cost.models import ModelShape
from minipar.cost.stages import FORMS
from minipar.schedules.registry import SCHEDULES
from tests.examples import examples

SIZES = (1, 1, 1, 2, 2, 3, 4)


@st.composite
def jobs_and_runs(draw):
    """A job and a layout, and the arguments of a TrainConfig that say the same; legal or not."""

    def pick(*values):
        return draw(st.sampled_from(values))

    experts = pick(0, 0, 4, 6)
    model = ModelConfig(
        vocab_size=pick(256, 258, 260), dim=48, num_layers=pick(2, 6, 8, 12), num_heads=pick(2, 4, 6, 12),
        num_kv_heads=pick(1, 2), hidden_dim=pick(12, 16, 24), max_seq_len=128, num_experts=experts,
        moe_every=pick(1, 1, 1, 9), shared_dim=pick(0, 8, 9) if experts else 0,
        group_tokens=pick(2, 3, 4, 8) if experts else None, attention=pick("flash", "fused", "plain"),
    )  # fmt: skip
    pp, cp, dp, tp = (pick(*SIZES) for _ in range(4))
    assume(pp * cp * dp * tp <= 64)
    cp_attention = pick("ring", "ring", "ulysses", "all_gather", "usp") if cp > 1 else "ring"
    schedule = pick(*FORMS) if pp > 1 else "1f1b"
    choice = SCHEDULES[schedule]
    batch, microbatch = pick(8, 12, 16, 24, 48), pick(1, 1, 2, 3)
    samples = batch // dp
    assume(samples % microbatch == 0 and samples)
    ep = pick(*SIZES) if experts else pick(1, 1, 1, 1, 1, 2)
    run = dict(
        model=model, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, zero=pick(0, 1, 2, 3), schedule=schedule,
        chunks=pick(2, 4) if choice.chunks is None else None, sequence_parallel=draw(st.booleans()),
        cp_attention=cp_attention, cp_ulysses=pick(1, 2, 3, 4) if cp_attention == "usp" else 1,
        recompute=pick("none", "full", "every:2", *["selective"] * (model.attention == "plain")),
        batch_size=batch, microbatches=samples // microbatch, seq_len=pick(24, 25, 26, 27, 36, 50, 64, 96),
    )  # fmt: skip
    how = Implementation(
        "dense" if model.attention == "plain" else model.attention, sequence_parallel=run["sequence_parallel"],
        cp_ulysses=run["cp_ulysses"], group_tokens=model.group_tokens,
    )  # fmt: skip
    layout = Layout(
        dp, pp, cp, run["ep"], tp, run["zero"], schedule, run["chunks"] or choice.chunks, microbatch,
        run["recompute"], cp_attention,
    )  # fmt: skip
    job = Job(
        ModelShape.of(model), MACHINES["h100"], layout.world_size, run["seq_len"], batch, "float32", how
    )
    return job, layout, run


@examples(400)
@given(jobs_and_runs())
def test_a_layout_is_illegal_where_the_trainer_refuses_it(drawn):
    job, layout, run = drawn
    assume(why_not_priced(job, layout) is None)
    try:
        TrainConfig(**run)
        refused = None
    except ValueError as error:
        refused = str(error)
    why = why_illegal(job, layout)
    assert (why is None) == (refused is None), (why, refused)


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
)
def test_tp_divides_what_it_splits(tp, kv, group, hidden, vocab, pad):
    legal = kv * group % tp == hidden % tp == 0 and (tp % kv == 0 or kv % tp == 0)
    legal = legal and (vocab % tp == 0 if not pad else -(-vocab // tp) * (tp - 1) < vocab)
    sizes = dict(num_heads=kv * group, num_kv_heads=kv, hidden_dim=hidden, vocab_size=vocab, num_experts=0)
    assert (broken(View(dict(tp=tp, pad_vocab=pad, **sizes)), TENSOR) is None) == legal


@pytest.mark.parametrize(
    "options", [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp_layout": "contiguous"}, {"cp_layout": "striped"}]
)
def test_without_cp_a_sample_may_have_any_length(options):
    """No layout of tokens cuts it, whatever cp_layout says."""
    assert TrainConfig(seq_len=255, **options).seq_len == 255


def test_cp_still_needs_a_length_that_it_divides():
    with pytest.raises(
        ValueError, match="cp=2 with cp_layout='zigzag' does not divide seq_len=254; use seq_len=256"
    ):
        TrainConfig(seq_len=254, cp=2)
