"""The next batch is made while a step computes; what goes wrong in making it is raised as it is."""

import threading
from contextlib import closing

import pytest

from minipar.train.made_ahead import made_ahead


@pytest.mark.parametrize("steps", [range(0), range(1), range(3, 9), range(0, 9, 3)])
def test_every_step_gets_its_own(steps):
    assert list(made_ahead(lambda step: step * step, steps)) == [(step, step * step) for step in steps]


def test_one_is_made_ahead_on_a_thread_of_its_own_and_no_more():
    asked, made = [threading.Event() for _ in range(5)], []

    def make(step):
        made.append(threading.current_thread() is threading.main_thread())
        asked[step].set()
        return step

    with closing(made_ahead(make, range(4))) as batches:
        for step, _ in batches:
            assert step == 3 or asked[step + 1].wait(10), "the next one is made while this one is used"
            assert len(made) <= step + 2
    assert made == [False] * 4


def test_an_error_is_raised_as_itself_at_its_step_and_no_thread_stays():
    class Lost(OSError):
        pass

    def make(step):
        if step == 2:
            raise Lost("the file is gone")
        return step

    before, seen = threading.active_count(), []

    def walk():
        for step, _ in made_ahead(make, range(5)):
            seen.append(step)

    with pytest.raises(Lost, match="the file is gone"):
        walk()
    assert seen == [0, 1]
    with closing(made_ahead(make, range(2))) as batches:
        assert next(batches) == (0, 0)
    assert threading.active_count() == before
