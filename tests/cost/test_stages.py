"""Closed forms of schedules are what the simulator finds, and what papers measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.cost.stages import (
    FORMS,
    chunk_choices,
    enough_microbatches,
    idle_s,
    live_chunks,
    live_heads,
    stage_layers,
    stages_of,
)
from minipar.model import Transformer
from minipar.pipeline.partition import balance, layer_costs
from minipar.schedules import Costs, make_schedule, simulate
from minipar.schedules.registry import SCHEDULES
from minipar.schedules.schedule import Schedule
from tests.cost.published import ZB_1F1B
from tests.examples import examples


def made(schedule: str, pp: int, m: int, v: int) -> Schedule:
    """The schedule, with v chunks a rank where it leaves them open."""
    return make_schedule(schedule, pp, m, v if SCHEDULES[schedule].chunks is None else None)


@examples(80)
@given(
    schedule=st.sampled_from(list(FORMS)),
    pp=st.integers(2, 6),
    rounds=st.integers(2, 4),
    v=st.sampled_from([2, 4]),
    f=st.floats(0.5, 2),
    extra=st.floats(0, 1),
    w=st.floats(0.5, 2),
)
def test_idle_time_and_live_activations_are_the_simulators(schedule, pp, rounds, v, f, extra, w):
    """For I and F of at least W, and in a V also I of at least F: attention has no weights, and recomputation adds to I."""
    f, m = max(f, w), rounds * pp
    i = (f if SCHEDULES[schedule].v_shaped else w) + extra
    whole = made(schedule, pp, m, v)
    chunks = whole.num_stages // pp
    timeline = simulate(whole, Costs(f / chunks, i / chunks, w / chunks))
    assert enough_microbatches(schedule, pp, m)
    idle = timeline.longest_own_span - m * (f + i + w)
    assert idle == pytest.approx(idle_s(schedule, pp, f, i, w, chunks), rel=1e-9, abs=1e-9)
    live = [live_chunks(schedule, rank, pp, m, chunks) for rank in range(pp)]
    assert tuple(live) == timeline.peak_live
    for rank in range(pp):
        assert stages_of(schedule, rank, pp, chunks) == whole.stages_of(rank)


@pytest.mark.parametrize("schedule", FORMS)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("rounds", [2, 3])
def test_the_last_stages_backwards_follow_forwards_but_for_live_heads(schedule, pp, rounds):
    whole = made(schedule, pp, rounds * pp, 2)
    last = whole.num_stages - 1
    own = next(actions for actions in whole.actions if any(a.stage == last for a in actions))
    ops = [action.op for action in own if action.stage == last and action.op != "W"]
    again = sum(before != "F" and op != "F" for before, op in zip(ops, ops[1:]))
    assert live_heads(schedule, rounds * pp) - 1 == again


@pytest.mark.parametrize("row", ZB_1F1B)
def test_1f1b_has_the_published_bubble(row):
    pp, m, f, i, w, comm, bubble = row
    work = m * (f + i + w)
    hops = 2 * (pp - 1) * (m / pp + 1) - 2  # after every p microbatches a rank waits for a round trip
    total = work + idle_s("1f1b", pp, f, i, w) + hops * comm
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
