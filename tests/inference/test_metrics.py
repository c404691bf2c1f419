import pytest

from minipar.inference import metrics_of
from minipar.inference.events import Event, Kind
from minipar.inference.metrics import Spread, request_times


def at(kind, number, time_s, num_tokens=0):
    return Event(kind, number, time_s, time_s, num_tokens)


# Request 0 waits 1 s, then writes at 3, 4 and (two tokens, by speculation) 6; request 1 writes its only token at 10.
LOG = [
    at(Kind.ARRIVE, 0, 1.0, 5),
    at(Kind.HIT, 0, 2.0, 2),
    Event(Kind.PREFILL, 0, 2.0, 3.0, 6),
    at(Kind.WRITE, 0, 3.0, 1),
    at(Kind.WRITE, 0, 4.0, 1),
    at(Kind.GUESSED, 0, 6.0, 4),
    at(Kind.ACCEPTED, 0, 6.0, 1),
    at(Kind.WRITE, 0, 6.0, 2),
    at(Kind.FINISH, 0, 6.0, 4),
    at(Kind.REFUSE, 2, 2.0),
    at(Kind.ARRIVE, 1, 5.0),
    at(Kind.PREEMPT, 1, 7.0),
    at(Kind.WRITE, 1, 10.0, 1),
    at(Kind.FINISH, 1, 10.0, 1),
    at(Kind.ARRIVE, 3, 5.0),  # unfinished
]


def test_the_figures_of_a_log_made_by_hand():
    metrics = metrics_of(LOG, first_token_target_s=2.0, per_token_target_s=1.0)
    assert (metrics.num_finished, metrics.num_refused, metrics.num_tokens) == (2, 1, 5)
    assert metrics.seconds == 9.0
    assert metrics.tokens_per_s == 5 / 9
    assert metrics.goodput_per_s == 1 / 9  # request 1 was late
    assert metrics.to_first_token_s == Spread(3.5, 2.0, 5.0, 5.0)
    assert metrics.per_output_token_s == Spread(1.0, 1.0, 1.0, 1.0)
    assert metrics.inter_token_s == Spread(1.0, 1.0, 1.0, 1.0)
    assert metrics.end_to_end_s == Spread(5.0, 5.0, 5.0, 5.0)
    assert (metrics.preemptions, metrics.prefix_hit_rate, metrics.acceptance_rate) == (1, 2 / 8, 1 / 4)


def test_the_gaps_of_a_request_add_up_to_its_time_of_writing():
    times = request_times(LOG)[0]
    assert times.gaps_s == (1.0, 1.0, 1.0)
    assert sum(times.gaps_s) == times.last_token_s - times.first_token_s


def test_a_goodput_without_targets_counts_every_request():
    assert metrics_of(LOG).goodput_per_s == 2 / 9


def test_of_a_hundred_values_one_exceeds_the_99th_percentile():
    spread = Spread.of(range(1, 101))
    assert (spread.p50, spread.p99, spread.max) == (50, 99, 100)
    assert spread.mean == pytest.approx(50.5)


def test_an_empty_log_has_figures_of_zero():
    metrics = metrics_of([])
    assert metrics.tokens_per_s == metrics.to_first_token_s.p99 == 0.0
