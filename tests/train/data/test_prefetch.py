"""The next batches are made while a step computes; what goes wrong in making one is raised as it is."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from minipar.train.data.prefetch import AHEAD, prefetch_batches


@pytest.mark.parametrize("steps", [range(0), range(1), range(3, 9), range(0, 9, 3), range(20)])
def test_every_step_gets_its_own(steps):
    assert list(prefetch_batches(lambda step: step * step, steps)) == [(step, step * step) for step in steps]


def test_a_few_are_made_ahead_on_a_thread_of_their_own_and_no_more():
    last, made = 2 * AHEAD, []
    asked = [threading.Event() for _ in range(last + 1)]

    def make(step):
        made.append(threading.current_thread() is threading.main_thread())
        asked[step].set()
        return step

    with closing(prefetch_batches(make, range(last + 1))) as batches:
        for step, _ in batches:
            assert asked[min(step + AHEAD, last)].wait(60), "the next ones are made while this one is used"
            assert len(made) <= step + 1 + AHEAD
    assert made == [False] * (last + 1)


def test_leaving_early_does_not_wait_for_batches_not_yet_begun(monkeypatch):
    made, begun, left, shutdown = [], threading.Event(), threading.Event(), ThreadPoolExecutor.shutdown

    def in_two_steps(thread, cancel_futures=False):
        shutdown(thread, wait=False, cancel_futures=cancel_futures)
        left.set()  # only now the batch in progress ends
        shutdown(thread)

    def make(step):
        if step == 1:
            begun.set()
            assert left.wait(60)
        made.append(step)
        return step

    batches = prefetch_batches(make, range(9))
    assert next(batches) == (0, 0)
    assert begun.wait(60)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", in_two_steps)
    batches.close()
    assert made == [0, 1]


def test_an_error_is_raised_as_itself_at_its_step_and_no_thread_stays():
    class Lost(OSError):
        pass

    def make(step):
        if step == 2:
            raise Lost("the file is gone")
        return step

    before, seen = threading.active_count(), []

    def walk():
        for step, _ in prefetch_batches(make, range(5)):
            seen.append(step)

    with pytest.raises(Lost, match="the file is gone"):
        walk()
    assert seen == [0, 1]
    with closing(prefetch_batches(make, range(2))) as batches:
        assert next(batches) == (0, 0)
    # Fewer, if a thread of an earlier test has ended meanwhile.
    assert threading.active_count() <= before
