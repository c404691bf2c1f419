"""An implementation that takes too long is stopped, whatever it does; the traces that ranks wrote are read again."""

import json
import signal
from contextlib import suppress

import pytest

from minipar.spec.from_file import Hangs, deadline, recorded
from minipar.support.trace import Span


def computing():
    while True:
        pass


@pytest.mark.parametrize(
    ("limits", "runs", "words"),
    [
        ((0.05, 600), computing, r"0\.05 s of computing \(test_from_file\.py"),
        ((None, 0.05), computing, r"0\.05 s \(test_from_file\.py"),
        ((0.05,), signal.pause, r"0\.2 s \(test_from_file\.py"),
    ],
    ids=["computing", "clock", "waiting"],
)
def test_what_runs_too_long_is_stopped_with_its_limit_and_line(limits, runs, words):
    with pytest.raises(Hangs, match=f"is still running after {words}, line "), deadline(*limits):
        runs()


def test_what_catches_the_first_stop_is_stopped_again():
    def stubborn():
        with suppress(Hangs):
            computing()
        computing()

    with pytest.raises(Hangs), deadline(0.05, 600):
        stubborn()


def test_no_timer_outlives_a_deadline():
    handlers = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGPROF)]
    with deadline(600):
        assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
    for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
        assert signal.getitimer(timer) == (0, 0)
    assert [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGPROF)] == handlers


def test_the_largest_worlds_traces_are_read_in_rank_order(tmp_path):
    assert recorded(tmp_path) == {}
    for rank, size in ((0, 1), (10, 11), (2, 11), (1, 2)):
        (tmp_path / f"{rank}-of-{size}.json").write_text(json.dumps([["send", "compute", rank, size]]))
    spans = recorded(tmp_path)
    assert list(spans) == [2, 10]
    assert spans[10] == [Span("send", "compute", 10, 11)]
