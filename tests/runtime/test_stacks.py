"""Where a rank is: from its own frames, and from what faulthandler writes."""

import faulthandler
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing import Pipe

import pytest

import minipar
from minipar.runtime import stacks, worker

DUMP = """Stack (most recent call first):
  File "/lib/python/thing.py", line 5 in spin
  File "/home of ann/my script.py", line 12 in work
  File "{worker}", line 122 in _call
  File "{worker}", line 105 in work
""".replace("{worker}", worker.__file__)


def test_the_callers_part_of_the_main_stack_is_read_from_a_dump():
    reads, writes = Pipe(duplex=False)
    for rest in ("", "rest of another dump\n  File " + '"other.py", line 1 in other\n'):
        os.write(writes.fileno(), (rest + DUMP).encode())
        stack = stacks.read_dump(reads, timeout_s=10)
        assert stack == [
            ("/home of ann/my script.py", 12, "work"),
            ("/lib/python/thing.py", 5, "spin"),
        ]


def test_a_dump_that_does_not_come_leaves_the_place_unknown():
    reads, _writes = Pipe(duplex=False)
    assert stacks.read_dump(reads, timeout_s=0) == []
    assert stacks.own_line([]) == ""


def test_a_rank_knows_its_own_stack_from_the_users_function_on():
    def work(world):
        def inner():
            return stacks.main_stack()

        return inner()

    (stack,) = minipar.run(work, world_size=1)
    assert [name for _, _, name in stack][:2] == ["work", "inner"]
    assert stacks.own_line(stack).startswith("test_stacks.py:")
    assert stacks.own_line(stack).endswith("in inner")
    assert "return inner()" in stacks.as_text(stack)


@pytest.fixture
def resting():
    """A thread that rests in `rests` until the test has ended."""

    def rests():
        arrived.set()
        leave.wait(60)

    arrived, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=rests)
    thread.start()
    assert arrived.wait(60)
    yield thread
    leave.set()
    thread.join()


def test_a_signal_writes_the_stack_of_no_other_thread(resting):
    """It comes while another thread may have the interpreter, and would free frames while they are walked over."""
    with tempfile.TemporaryFile() as file:
        stacks.write_on_signal(signal.SIGUSR1, file.fileno())
        signal.raise_signal(signal.SIGUSR1)
        faulthandler.unregister(signal.SIGUSR1)
        file.seek(0)
        written = file.read().decode()
    assert "in test_a_signal_writes_the_stack_of_no_other_thread\n" in written
    assert "in rests\n" not in written


def test_every_thread_has_its_own_stack(resting):
    thread, found = resting, stacks.all_stacks()
    assert "rests" in [name for _, _, name in found[thread.ident]]
    mine = [name for _, _, name in found[threading.get_ident()]]
    assert mine.index("test_every_thread_has_its_own_stack") < mine.index("all_stacks")


def asked_without_descriptors(world):
    """The function that the main thread is in, with no descriptor left for a file."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, old[1]))
    os.close(lowest)
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        return stacks.main_stack()[-2][2]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


def test_a_rank_without_descriptors_still_says_where_it_is():
    """It would raise in the thread that answers the caller, and the rank would be killed."""
    assert minipar.run(asked_without_descriptors, world_size=1) == ["main_stack"]


FREES_WITHOUT_THE_INTERPRETER = """
import io, os, threading
from minipar.runtime import stacks

def from_c(_):
    held = io.FileIO(os.devnull)  # closed as the call ends, when the function is no frame any more

asked = threading.Thread(target=lambda: [stacks.all_stacks() for _ in range(2000)])
asked.start()
while asked.is_alive():
    list(map(from_c, range(100)))
"""


def test_a_rank_that_is_freeing_what_it_held_can_be_asked():
    """By faulthandler Python 3.13 crashes here, nearly every time."""
    assert (
        subprocess.run([sys.executable, "-W", "ignore", "-c", FREES_WITHOUT_THE_INTERPRETER]).returncode == 0
    )


def test_a_function_of_a_comm_is_told_from_the_users_own():
    for module in (minipar.comm.ring, minipar.comm.transport.stream):
        assert stacks.inside_comm([(module.__file__, 1, "all_reduce")])
    assert not stacks.inside_comm([(__file__, 1, "all_reduce")])
