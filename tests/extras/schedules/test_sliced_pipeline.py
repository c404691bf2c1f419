"""Slices of a sequence on real ranks: the losses and gradients of one process, whatever the cut; memory; planted faults."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.config.model_config import ModelConfig
from minipar.extras.schedules.sequence_slices import SlicedSchedule, seq1f1b
from minipar.extras.schedules.sliced_pipeline import (
    SequenceSlices,
    SlicedPipeline,
    _EarlierSlices,
)
from minipar.model import Transformer
from minipar.model.attention import Attention, plain_attention
from minipar.schedules.one_f_one_b import one_f_one_b
from minipar.schedules.schedule import Action
from tests.examples import examples
from tests.pipeline.programs import (
    assert_same,
    check_emulated,
    make_batch,
    one_process,
    own_stages,
    refusal,
    small_config,
    together,
    train_step,
)
from tests.strategies import assert_equal_to, seeds


@st.composite
def sliced(draw, max_ranks: int = 3, max_microbatches: int = 3, max_slices: int = 4):
    """A schedule, a model of as many tokens a sample as its slices have, a batch, and whether stages recompute."""
    p, m = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_microbatches))
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=max_slices)))
    schedule = seq1f1b(p, m, len(sizes), sizes)
    config = small_config(
        p + draw(st.integers(0, 1)),
        max_seq_len=sum(sizes),
        num_kv_heads=draw(st.sampled_from([1, 2])),
        dropout=draw(st.sampled_from([0.0, 0.2])),
        tie_embeddings=draw(st.booleans()),
        attention=draw(st.sampled_from(["fused", "plain", "flash"])),
    )
    batch = make_batch(config, m * draw(st.integers(1, 2)), draw(seeds))
    return schedule, config, batch, draw(st.booleans())


def check(case, world_size: int) -> None:
    schedule, config, batch, recomputed = case
    parts = minipar.run(
        lambda world: train_step(
            world, config, torch.float64, schedule, batch, steps=2, checkpoint=recomputed
        ),
        world_size=world_size,
    )
    loss, got = together(parts)
    want_loss, want = one_process(config, torch.float64, batch, schedule.num_microbatches, steps=2)
    assert_equal_to(loss, want_loss)
    assert_same(got, want)


@examples(8)
@given(sliced())
def test_a_batch_in_slices_trains_as_one_process(case):
    check(case, world_size=3)


@pytest.mark.slow
@examples(100)
@given(sliced(max_ranks=5, max_microbatches=6, max_slices=6))
def test_a_batch_in_slices_trains_as_one_process_on_more_ranks(case):
    check(case, world_size=5)


CONFIG = small_config(2, max_seq_len=7, num_kv_heads=1, dropout=0.2, tie_embeddings=True)
BATCH = make_batch(CONFIG, 4)
SIZES = (3, 2, 2)
SCHEDULE = seq1f1b(2, 2, 3, SIZES)


def test_an_emulated_run_takes_slices_as_microbatches():
    check_emulated(seq1f1b(2, 2, 3))


def test_backwards_may_be_split():
    """I reads the gradients of keys and values; W has its products put off, as for whole samples."""
    f, b, i, w = (lambda stage, k, op=op: Action(op, stage, k) for op in "FBIW")
    first = (f(0, 0), f(0, 1), i(0, 1), i(0, 0), w(0, 0), w(0, 1))
    last = (f(1, 0), f(1, 1), b(1, 1), i(1, 0), w(1, 0))
    split = SlicedSchedule((first, last), (0, 1), 1, "split", 2, (3, 4))
    check((split, CONFIG, BATCH, False), world_size=2)


def test_positions_and_sample_ids_may_be_given():
    """Documents: positions [B, T] that start anew. Dropout goes by each token's index all the same."""
    config = ModelConfig(24, 8, 2, 2, hidden_dim=16, max_seq_len=7, dropout=0.3, documents=True)
    starts = torch.tensor(
        [[0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 3, 4], [0, 0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2]]
    )
    tokens, targets = make_batch(config, 4)
    ids = torch.tensor([5, 2, 9, 0])

    def step(world):
        stages = own_stages(Transformer(config, dtype=torch.float64), SCHEDULE, world.rank)
        pipeline = SlicedPipeline(stages, world, SCHEDULE)
        loss = pipeline.step(tokens, targets, per_sample={"sample_ids": ids, "positions": starts})
        return loss, {name: p.grad for stage in stages for name, p in stage.named_parameters()}

    loss, got = together(minipar.run(step, world_size=2))
    model = Transformer(config, dtype=torch.float64)
    want = model.loss(tokens, targets, positions=starts, sample_ids=ids)
    want.backward()
    assert_equal_to(loss, want.detach())
    assert_same(got, {name: p.grad for name, p in model.named_parameters()})


def _looked_at(world, schedule):
    """What the stage keeps after each action of a step, as (units, keys' tokens, microbatches); bytes sent; its loss."""
    model = Transformer(CONFIG, dtype=torch.float64)
    pipeline = SlicedPipeline(own_stages(model, schedule, world.rank), world, schedule)
    (stage,) = pipeline.stages.values()
    seen, sent = [], []

    def look(run):
        def wrapped(*args, **kwargs):
            result = run(*args, **kwargs)
            keys = [own for layers in stage._slices._kept.values() for own in layers[0]]
            tokens = sum(x.keys.leaf.shape[2] for x in keys)
            seen.append((len(stage._kept), tokens, len(stage._slices._kept)))
            return result

        return wrapped

    for name in ("forward", "backward"):
        setattr(stage, name, look(getattr(stage, name)))
    for _ in range(2):
        world.traffic.reset()
        pipeline.step(*BATCH)
        sent.append(world.traffic.sent_bytes)
    loss = pipeline.evaluate(*BATCH)
    units = schedule.num_microbatches * schedule.slices
    kept_in_evaluation = seen[-units:]
    return seen[: 2 * units], sent, loss, kept_in_evaluation


def test_what_is_kept_and_sent_is_what_the_schedule_says():
    parts = minipar.run(_looked_at, SCHEDULE, world_size=2)
    for rank, (seen, _, _, in_evaluation) in enumerate(parts):
        alive = []  # a unit's keys live from its F to its B, as its other activations do
        for action in SCHEDULE.actions[rank]:
            unit = action.microbatch
            alive = [*alive, unit] if action.op == "F" else [u for u in alive if u != unit]
            microbatches = {u // 3 for u in alive}
            assert seen.pop(0) == (len(alive), sum(SIZES[u % 3] for u in alive), len(microbatches))
        assert [keys for _, keys, _ in in_evaluation] == [3, 5, 0] * 2
    tied = 2 * CONFIG.vocab_size * CONFIG.dim * 8
    steady = 2 * BATCH[0].numel() * CONFIG.dim * 8 + tied
    assert [sum(per_rank) for per_rank in zip(*(sent for _, sent, _, _ in parts))] == [
        steady + 3 * 80,
        steady,
    ]
    want = Transformer(CONFIG, dtype=torch.float64).eval().loss(*BATCH)
    assert_equal_to(parts[1][2], want.detach())


def _kept_by_each_forward(world):
    """By how many each forward of a step, recomputed ones included, leaves more keys and values than slices before it."""
    more = []

    def counting(self, k, v):
        result = extend(self, k, v)
        more.append(len(self._kept) - self._n)
        return result

    with mock.patch.object(_EarlierSlices, "extend", counting):
        train_step(world, CONFIG, torch.float64, SCHEDULE, BATCH, checkpoint=True)
    return more


def test_a_forward_that_is_recomputed_keeps_nothing_again():
    assert minipar.run(_kept_by_each_forward, world_size=2) == [[1] * 2 * 6] * 2


# Faults --------------------------------------------------------------------------------------------------------------

extend, positions = _EarlierSlices.extend, SequenceSlices._positions


def _detached(self, k, v):
    keys, values = extend(self, k, v)
    own = k.shape[2]
    return torch.cat((keys[:, :, :-own].detach(), k), 2), torch.cat((values[:, :, :-own].detach(), v), 2)


FAULTS = {
    "gradients of earlier slices' keys and values are forgotten": (
        SequenceSlices,
        "gradients",
        lambda self, unit: ([], []),
    ),
    "those of the values alone are forgotten": (
        SequenceSlices,
        "gradients",
        lambda self, unit, run=SequenceSlices.gradients: tuple(x[::2] for x in run(self, unit)),
    ),
    "earlier slices get none": (_EarlierSlices, "extend", _detached),
    "earlier slices are not seen": (
        _EarlierSlices,
        "extend",
        lambda self, k, v: (extend(self, k, v) and k, v),
    ),
    "every slice begins at position 0": (
        SequenceSlices,
        "_positions",
        lambda self, start, T, device: positions(self, 0, T, device),
    ),
    "a query sees one key too many": (
        Attention,
        "core",
        property(lambda self: lambda q, k, v, causal=True: _seeing_ahead(q, k, v)),
    ),
}


def _seeing_ahead(q, k, v):
    """Plain attention whose mask is off by one slice: of the slice's own tokens every one is seen."""
    return plain_attention(q, k, v, causal=False)


def _with_fault(world, fault, *program, **options):
    with mock.patch.object(*fault):
        return train_step(world, *program, **options)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_changes_a_gradient(fault):
    program = (CONFIG, torch.float64, SCHEDULE, BATCH)
    parts = minipar.run(
        lambda world: _with_fault(world, FAULTS[fault], *program),
        world_size=2,
    )
    _, got = together(parts)
    _, want = one_process(CONFIG, torch.float64, BATCH, 2)
    with pytest.raises(AssertionError, match="max"):
        assert_same(got, want)


# Refusals ------------------------------------------------------------------------------------------------------------


def _own(world, schedule, **options):
    return own_stages(Transformer(small_config(1, max_seq_len=7, **options)), schedule, world.rank)


def _grouped(world):
    schedule = seq1f1b(1, 1, 2, (3, 4))
    stages = _own(world, schedule, num_experts=2, group_tokens=4, moe_every=1)
    SlicedPipeline(stages, world, schedule).step(*BATCH)


def _reading_a_part(world):
    stages = _own(world, seq1f1b(1, 1, 2))
    stages[0].overrides.default_positions = lambda T, device: torch.arange(T)
    SlicedPipeline(stages, world, seq1f1b(1, 1, 2))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            lambda world: SlicedPipeline([nn.Linear(4, 4)], world, seq1f1b(1, 1, 2)),
            "slices=2 of a sample on stage 0, a Linear; use a Transformer, whose attentions can see earlier slices",
        ),
        (
            lambda world: SlicedPipeline(
                _own(world, one_f_one_b(1, 1)), world, seq1f1b(1, 1, 2), loss_fn=torch.sub
            ),
            "slices=2 with a loss_fn: means do not add up; use loss_fn=None",
        ),
        (
            lambda world: SlicedPipeline(_own(world, seq1f1b(1, 1, 8)), world, seq1f1b(1, 1, 8)).step(*BATCH),
            "slices=8 are more than inputs.shape[1]=7 tokens; use 7 or fewer",
        ),
        (
            lambda world: SlicedPipeline(_own(world, seq1f1b(1, 1, 2)), world, seq1f1b(1, 1, 2, (3, 3))).step(
                *BATCH
            ),
            "slice_sizes=[3, 3] does not cut dim 1 of length 7 into 2 parts",
        ),
        (_grouped, "4 tokens at positions [3, 4, 5, 6] are not whole routing groups"),
        (
            _reading_a_part,
            "slices=2: default_positions has been replaced, so this stage reads a part of every sample",
        ),
    ],
)
def test_what_cannot_be_cut_is_one_clear_line(fn, message):
    (said,) = refusal(fn)
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize("sizes", [None, (1, 4)])
def test_units_are_the_slices_of_each_microbatch_in_order(sizes):
    x = torch.arange(2 * 5).view(2, 5)

    def cut(world):
        schedule = seq1f1b(1, 2, 2, sizes)
        return SlicedPipeline(_own(world, schedule), world, schedule)._cut_tokens("x", x)

    (units,) = minipar.run(cut, world_size=1)
    at = 3 if sizes is None else 1
    assert [u.tolist() for u in units] == [
        x[i : i + 1, a:b].tolist() for i in (0, 1) for a, b in ((0, at), (at, 5))
    ]


def logits_after_a_step(world, config, batch):
    stage = Transformer(config)
    SlicedPipeline([stage], world, seq1f1b(1, 2, 2, (1, 3))).step(*batch)
    assert stage.overrides.default_positions is None  # else it could not generate
    assert {block.attention.overrides.cache for block in stage.layers.values()} == {None}
    return torch.equal(stage(batch[0]), Transformer(config)(batch[0]))


def test_after_a_step_the_model_reads_whole_samples_again():
    config = small_config(2)
    assert minipar.run(logits_after_a_step, config, make_batch(config, 2), world_size=1) == [True]
