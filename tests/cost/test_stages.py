"""Closed forms of schedules are what the simulator finds, and what papers measured."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar.cost.stages import (
    PLANNED,
    chunk_choices,
    enough_microbatches,
    idle_s,
    live_chunks,
    message_hops,
    stage_layers,
    stages_of,
)
from minipar.model import ModelConfig, Transformer
from minipar.pipeline.partition import balance, layer_costs
from minipar.schedules import Costs, make_schedule, simulate
from minipar.schedules.registry import LOOPED, SLICED, V_SHAPED
from tests.cost.published import ZB_1F1B


@settings(max_examples=80)
@given(
    schedule=st.sampled_from(PLANNED),
    pp=st.integers(2, 6),
    rounds=st.integers(2, 4),
    v=st.sampled_from([2, 4]),
    s=st.integers(2, 8),
    f=st.floats(0.5, 2),
    extra=st.floats(0, 1),
    w=st.floats(0.5, 2),
)
def test_idle_time_and_live_activations_are_the_simulators(schedule, pp, rounds, v, s, f, extra, w):
    """For I and F of at least W, and in a V also I of at least F: attention has no weights, and recomputation adds to I."""
    f, m = max(f, w), rounds * pp
    i = (f if schedule in V_SHAPED else w) + extra
    chunks = v if schedule in LOOPED else 2 if schedule in V_SHAPED else 1
    slices = s if schedule in SLICED else 1
    made = make_schedule(schedule, pp, m, chunks, slices=slices)
    parts = made.num_stages // pp
    timeline = simulate(made, Costs(f / parts, i / parts, w / parts))
    assert enough_microbatches(schedule, pp, m)
    idle = timeline.longest_own_span - m * slices * (f + i + w)
    assert idle == pytest.approx(idle_s(schedule, pp, f, i, w, chunks), rel=1e-9, abs=1e-9)
    live = [live_chunks(schedule, rank, pp, m, chunks, slices) for rank in range(pp)]
    assert tuple(live) == timeline.peak_live
    for rank in range(pp):
        assert stages_of(schedule, rank, pp, chunks) == made.stages_of(rank)


@pytest.mark.parametrize("schedule", PLANNED)
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4])
def test_messages_lengthen_a_step_as_the_simulator_says(schedule, pp, rounds):
    slices = 3 if schedule in SLICED else 1
    made, c = make_schedule(schedule, pp, rounds * pp, slices=slices), 0.001
    span = [simulate(made, Costs(1, 1, 1, comm)).longest_own_span for comm in (0, c)]
    hops = message_hops(schedule, pp, rounds * pp, made.num_stages // pp, slices)
    assert (span[1] - span[0]) / c == pytest.approx(hops, abs=1 if schedule == "seq1f1b" else 1e-6)


@pytest.mark.parametrize("row", ZB_1F1B)
def test_1f1b_has_the_published_bubble(row):
    pp, m, f, i, w, comm, bubble = row
    work = m * (f + i + w)
    total = work + idle_s("1f1b", pp, f, i, w) + message_hops("1f1b", pp, m) * comm
    assert 1 - work / total == pytest.approx(bubble, abs=2e-4)


@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from([256, 20000]))
def test_layers_are_cut_as_the_library_cuts_them(num_layers, num_stages, vocab_size):
    if num_layers < num_stages:
        with pytest.raises(ValueError, match="use at most"):
            stage_layers(num_layers, num_stages)
        return
    config = ModelConfig(dim=64, num_layers=num_layers, num_heads=4, vocab_size=vocab_size)
    costs = layer_costs(Transformer(config, device="meta"))
    costs[0] -= config.dim  # the embedding, next to nothing
    layer = costs[0] if num_layers > 1 else costs[0] - config.dim * vocab_size
    got = stage_layers(num_layers, num_stages, config.dim * vocab_size / layer)
    assert list(got) == [len(stage) for stage in balance(costs, num_stages)]


def test_what_no_schedule_can_fill_is_not_considered():
    assert chunk_choices("1f1b", 4, 1) == (1,)
    assert chunk_choices("interleaved", 12, 4) == (2,)
    assert chunk_choices("zb-v", 8, 8) == ()
    assert not enough_microbatches("interleaved", 4, 6)
    assert not enough_microbatches("zb-h1", 4, 6)
    assert enough_microbatches("1f1b", 4, 1)
