"""Which threads of a process may still act by themselves, told from where they are."""

import io
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from tqdm import tqdm

import minipar
from minipar.comm.transport.stream import ThreadStream
from minipar.runtime.threads import busy_threads


def joins(end):
    other = threading.Thread(target=end.wait, name="joined")
    other.start()
    other.join()


def gets(end):
    box = queue.Queue()
    threading.Thread(target=lambda: box.put(end.wait()), name="puts").start()
    box.get()


def spins(end):
    while not end.is_set():
        pass


def sleeps(end):
    while not end.is_set():
        time.sleep(0.01)


@contextmanager
def running(function):
    end = threading.Event()
    thread = threading.Thread(target=function, args=(end,), name="helper")
    thread.start()
    try:
        yield thread
    finally:
        end.set()
        thread.join()


def seen(thread, expected: bool, waiting=()) -> bool:
    """Whether the thread is soon seen to be busy, or soon not: it needs a moment to get where it waits."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if any(repr(thread.name) in words for words in busy_threads(waiting)) == expected:
            return True
    return False


@pytest.mark.parametrize("idle", [threading.Event.wait, joins, gets], ids=["waits", "joins", "gets"])
def test_a_thread_that_waits_for_another_one_is_idle(idle):
    with running(idle) as thread:
        assert seen(thread, expected=False)


@pytest.mark.parametrize(
    "busy", [spins, sleeps, lambda end: end.wait(60)], ids=["spins", "sleeps", "times out"]
)
def test_a_thread_that_may_go_on_by_itself_is_busy(busy):
    with running(busy) as thread:
        assert seen(thread, expected=True)
        assert not any("helper" in words for words in busy_threads({thread.ident}))


def with_a_bar():
    bar = tqdm(file=io.StringIO())
    monitor = bar.monitor
    bar.close()
    return monitor


def test_the_thread_that_redraws_bars_is_idle():
    assert with_a_bar().is_alive()
    assert not any("tqdm" in words for words in busy_threads(()))


def test_idle_threads_of_a_pool_and_of_a_stream_are_not_busy():
    stream, before = ThreadStream("comm 'x'"), threading.active_count()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(int).result()
        stream.submit(int).wait()
        idle = [t for t in threading.enumerate() if t.name.startswith(("ThreadPoolExecutor", "comm 'x'"))]
        assert len(idle) >= 2
        assert all(seen(thread, expected=False) for thread in idle)
    assert threading.active_count() <= before + 1


def test_a_busy_stream_is_busy():
    stream, end = ThreadStream("comm 'x'"), threading.Event()
    handle = stream.submit(lambda: end.wait(60))
    assert seen(next(t for t in threading.enumerate() if t.name == "comm 'x'"), expected=True)
    end.set()
    handle.wait()


# What a pool makes of it -----------------------------------------------------------------------------------------


def both_receive(world, receive_on_helper):
    """A deadlock of the main threads; a helper of rank 1 does what it is told to."""
    main, side = world.subgroup([0, 1], "main"), world.subgroup([0, 1], "side")
    one = ((1,), torch.float32, 1 - world.rank)
    if world.rank == 1:
        helper = threading.Thread(target=receive_on_helper, args=(side, one), daemon=True)
        helper.start()
    main.recv(*one)


@pytest.mark.thorough
def test_a_helper_thread_that_is_at_work_may_free_a_rank():
    """Both main threads wait for each other's messages, and no deadlock it is: the helper sends, in its own time."""

    def patient(world):
        main, side = world.subgroup([0, 1], "main"), world.subgroup([0, 1], "side")
        if world.rank == 0:
            side.recv((1,), torch.float32, 1)
            main.send(torch.ones(1), 1)
            return None

        def helper():
            threading.Event().wait(3)  # long enough for several looks at who waits for whom
            side.send(torch.ones(1), 0)

        thread = threading.Thread(target=helper)
        thread.start()
        received = main.recv((1,), torch.float32, 0)
        thread.join()
        return received.item()

    assert minipar.run(patient, world_size=2) == [None, 1.0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "helper",
    [lambda side, one: side.recv(*one), lambda side, one: threading.Event().wait()],
    ids=["receives in vain", "waits for nobody"],
)
def test_a_helper_thread_that_waits_itself_does_not_hide_a_deadlock(helper):
    """Proved well before the deadline of a minute."""
    with pytest.raises(minipar.RankError, match="deadlock: rank 0 waits to receive"):
        minipar.run(both_receive, helper, world_size=2)
