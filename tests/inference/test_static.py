"""Static batches take the steps that an engine takes for batch after batch, and their padding is its formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, Options, Request, metrics_of, static
from minipar.inference.events import Event, Kind, StepCounts
from minipar.inference.static import Places, in_steps, places_of, static_batches
from minipar.model import Transformer
from tests.examples import examples

MODEL = Transformer(ModelConfig(vocab_size=8, dim=8, num_layers=1, num_heads=1, max_seq_len=32))


def log_of(lengths, arrivals):
    """What the log of any service of these requests says of their arrivals and texts."""
    log = [Event(Kind.ARRIVE, i, arrival, arrival, 3) for i, arrival in enumerate(arrivals)]
    return log + [Event(Kind.FINISH, i, 99.0, 99.0, length) for i, length in enumerate(lengths)]


def steps_and_padding_by_formula(lengths, size):
    batches = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    steps = sum(map(max, batches))
    return steps, sum(len(batch) * max(batch) - sum(batch) for batch in batches)


def test_two_batches_made_by_hand():
    """Lengths 1, 3 arrive at 0 and 2; then 2, at 9: the first batch lasts from 2 to 5, the second from 9 to 11."""
    log = static_batches(log_of([1, 3, 2], [0.0, 2.0, 9.0]), 2)
    spans = {(e.kind, e.number, e.begin_s, e.end_s) for e in log if e.kind in (Kind.PREFILL, Kind.PAD)}
    assert spans == {
        (Kind.PREFILL, 0, 2, 3), (Kind.PAD, 0, 3, 5), (Kind.PREFILL, 1, 2, 3), (Kind.PREFILL, 2, 9, 10),
    }  # fmt: skip
    assert {e.number: e.end_s for e in log if e.kind == Kind.FINISH} == {0: 3, 1: 5, 2: 11}
    assert places_of(log, 2) == Places(num_steps=11, num_working=6, size=2)
    assert metrics_of(log).to_first_token_s.max == 3


def steps_and_padding_agree(lengths, size):
    log = static_batches(log_of(lengths, [0.0] * len(lengths)), size)
    padding = sum(event.num_tokens for event in log if event.kind == Kind.PAD)
    return (places_of(log, size).num_steps, padding) == steps_and_padding_by_formula(lengths, size)


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


@given(LENGTHS, st.integers(1, 4))
@examples(60)
def test_steps_and_padding_are_their_formulas(lengths, size):
    assert steps_and_padding_agree(lengths, size)


def test_a_place_that_pads_a_step_too_long_is_found(monkeypatch):
    """The fault: a batch's end one step after its longest request's."""
    row = static._row
    monkeypatch.setattr(static, "_row", lambda a, n, begin, end: row(a, n, begin, end + 1))
    assert not steps_and_padding_agree([1, 8, 1, 8], 2)


@given(LENGTHS, st.integers(1, 4))
@examples(10)
def test_an_engine_takes_as_many_steps_for_batch_after_batch(lengths, size):
    requests = [Request((1, 2), length) for length in lengths]
    engine, steps = Engine(MODEL, Options(prefix_cache=False)), 0
    for first in range(0, len(requests), size):
        engine.run(requests[first : first + size])
        steps += len(engine.steps)
    engine = Engine(MODEL, Options(max_running=size, prefix_cache=False))
    engine.run(requests)
    static_log = static_batches(in_steps(engine.events, engine.steps), size)
    assert places_of(static_log, size).num_steps == steps >= len(engine.steps)
    assert places_of(in_steps(engine.events, engine.steps), size) == (len(engine.steps), sum(lengths), size)


def test_steps_of_any_length_are_one_each_and_idle_time_none():
    steps = [
        StepCounts(0.0, 0.5, 1, 1, 0, 0),
        StepCounts(0.5, 0.6, 1, 1, 0, 0),
        StepCounts(7.0, 9.0, 1, 1, 0, 0),
    ]
    times = [(0.0, 0.5), (0.5, 0.6), (0.55, 0.55), (6.0, 6.0), (7.0, 9.0), (9.0, 9.0)]
    counted = in_steps([Event(Kind.DECODE, 0, *time) for time in times], steps)
    assert [(e.begin_s, e.end_s) for e in counted] == [(0, 1), (1, 2), (2, 2), (2, 2), (2, 3), (3, 3)]


def test_an_empty_log_has_no_batches_and_size_0_is_refused():
    assert static_batches([], 4) == []
    assert places_of([], 4).share == 0.0
    with pytest.raises(ValueError, match="batch_size=0"):
        static_batches([], 0)
