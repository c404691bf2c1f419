"""Failures become a RankError within seconds that says what happened, and no process outlives its caller."""

import os
import re
import signal
import threading
import time
from multiprocessing import Pipe, connection
from types import SimpleNamespace

import pytest
import torch

import minipar
from minipar.comm.transport.diagnosis import MessageCounts
from minipar.runtime import call, launch
from minipar.runtime.call import Call
from minipar.runtime.protocol import Status
from minipar.runtime.serialization import dumps
from tests import failures
from tests.programs import Program

# what fails: on which rank, what is said about it, and what about the other rank
FAILURES = {
    failures.raises: (1, "KeyError: 'no such weight'", "receive 12 bytes from rank 1"),
    failures.is_killed: (1, "its process was killed by SIGKILL", "receive 12 bytes from rank 1"),
    failures.exits_at_once: (1, "its process ended with exit code 3", "receive 12 bytes from rank 1"),
    failures.asks_to_exit: (1, "SystemExit: enough", "receive 12 bytes from rank 1"),
    failures.keeps_another_waiting: (1, "rank 0 waited 1 s to receive 12 bytes from rank 1", "waited 1 s"),
    failures.both_receive_first: (0, "rank 1 waits to receive 12 bytes", "(failures.py"),
    failures.both_send_first: (0, "waits to send 4194304 bytes to rank 1", "in both_send_first"),
    failures.receives_from_one_that_has_returned: (0, "from rank 1 on comm 'world'", "has returned"),
    failures.sends_to_one_that_has_returned: (0, "waits to send 12 bytes to rank 1", "has returned"),
    failures.receives_another_size: (
        0,
        "but rank 1 expects 20 bytes",
        "waiting to receive 20 bytes from rank 0",
    ),
    failures.leaves_a_message: (0, "sent 1 message to rank 1 on comm 'world' that was not received", ""),
    failures.leaves_a_receive: (0, "asked rank 1 for 1 message on comm 'world' that was not sent", ""),
    failures.skips_a_collective: (0, "but rank 1's function has returned", "has returned"),
    failures.skips_a_native_collective: (0, 'algorithm="native"', "has returned"),
    failures.returns_what_cannot_travel: (1, "cannot pickle", ""),
}
LONG_GRACE_S = (
    10.0  # for ranks that come late to their messages, or to an answer; it is over when all have answered
)
OWN_DEADLINE = {failures.keeps_another_waiting, failures.skips_a_native_collective}
TAGGED = {
    failures.receives_another_size,
    failures.leaves_a_message,
    failures.leaves_a_receive,
    failures.skips_a_native_collective,
}


def marked(fails):
    """With the mark of what only the tagged transport says."""
    marks = [pytest.mark.tagged("its words; others are in test_checked.py")] if fails in TAGGED else []
    return pytest.param(fails, marks=marks, id=fails.__name__)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fails", list(map(marked, FAILURES)))
def test_a_failure_is_explained_and_the_next_run_is_unharmed(fails, monkeypatch):
    if fails not in OWN_DEADLINE:
        monkeypatch.setattr(call, "GRACE_S", LONG_GRACE_S)
    rank, about_it, about_the_other = FAILURES[fails]
    before = minipar.run(lambda world: os.getpid(), world_size=2)
    with pytest.raises(minipar.RankError) as caught:
        minipar.run(fails, world_size=2, timeout_s=1 if fails in OWN_DEADLINE else 60)
    error = caught.value
    assert error.rank == rank
    assert about_it in error.remote_traceback
    assert about_the_other in error.waiting.get(1 - rank, "")
    assert f"rank {rank} failed" in str(error)
    assert error.remote_traceback.rstrip() in str(error)
    after = minipar.run(lambda world: (os.getpid(), world.all_reduce(torch.ones(1)).item()), world_size=2)
    assert [total for _, total in after] == [2.0, 2.0]
    assert not {pid for pid, _ in after} & set(before)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("hangs", "where"),
    [
        (failures.sleeps, "it is running (failures.py:"),
        (failures.sleeps_through_a_native_collective, "it is running (failures.py:"),
        (failures.spins, "in spins\n"),
        (failures.spins_in_native_code, "sum(itertools.repeat(1))"),
        (failures.is_stopped, "it is stopped by a signal (failures.py:"),
        (failures.is_stopped_and_lost, "it is stopped by a signal (failures.py:"),
    ],
)
def test_the_rank_that_hangs_is_named_not_one_that_waits_for_it(hangs, where):
    """Past the deadline of the others, some of whom wait for ranks that wait for it."""
    _names_the_rank_that_hangs(hangs, where)


@pytest.mark.thorough
def test_a_hanging_rank_is_named_as_others_make_a_process_group():
    """In a pool of more ranks than the run has, torch's collectives need a process group of the run's own."""
    minipar.run(lambda world: None, world_size=8)
    _names_the_rank_that_hangs(
        failures.sleeps_through_a_native_collective, "it is running (failures.py:", "Wait timeout"
    )


def _names_the_rank_that_hangs(hangs, where, said="waited 3 s to|[Tt]imed out|Application timeout"):
    with pytest.raises(minipar.RankError) as caught:
        minipar.run(hangs, world_size=4, timeout_s=3)  # no other rank may begin so much later than the first
    error = caught.value
    assert error.rank == 1
    assert error.remote_traceback.startswith("rank 1 is late: ")
    assert re.search(said, error.remote_traceback)
    assert where in error.remote_traceback
    assert set(error.waiting) == {0, 2, 3}


def test_a_deadlock_names_the_blocked_ranks_operation_and_line():
    with pytest.raises(minipar.RankError) as caught:
        minipar.run(failures.skips_a_collective, world_size=2)
    (said,) = re.findall(r"rank 0 waits to .*", caught.value.remote_traceback)
    assert "(all_reduce sum float32, message 0)" in said
    assert re.search(r"\(failures\.py:\d+ in skips_a_collective\)$", said)


def test_deadlocks_are_told_from_slow_partners():
    """A rank may wait as long as it likes for one that is at work."""

    def patient(world):
        if world.rank == 0:
            return world.recv((1,), torch.float32, 1).item()
        deadline = time.monotonic() + 3  # long enough for several looks at who waits for whom
        while time.monotonic() < deadline:
            torch.ones(100, 100) @ torch.ones(100, 100)
        world.send(torch.ones(1), 0)

    assert minipar.run(patient, world_size=2) == [1.0, None]


def test_the_traceback_begins_with_the_users_own_function():
    with pytest.raises(minipar.RankError) as caught:
        minipar.run(failures.raises, world_size=2)
    first_frame = caught.value.remote_traceback.splitlines()[1]
    assert "failures.py" in first_frame
    assert "in raises" in first_frame


def test_the_first_failure_is_reported_not_one_it_caused(monkeypatch):
    """Rank 3 fails; ranks 0 to 2 find their messages undeliverable."""
    monkeypatch.setattr(call, "GRACE_S", LONG_GRACE_S)

    def chain(world):
        if world.rank == 3:
            raise ArithmeticError("the cause")
        return world.recv((1,), torch.float32, world.rank + 1)

    with pytest.raises(minipar.RankError, match="the cause") as caught:
        minipar.run(chain, world_size=4)
    assert caught.value.rank == 3
    for rank in range(3):
        assert f"receive 4 bytes from rank {rank + 1}" in caught.value.waiting[rank]


def test_an_answer_arriving_during_a_status_query_is_not_lost():
    here, there = Pipe()
    keeper, _other_end = Pipe()
    one = SimpleNamespace(rank=0, pipe=here, outputs=(), stopped=False)

    def rank():
        there.recv_bytes()
        there.send_bytes(dumps(("ready", None)))
        there.send_bytes(dumps(("status", Status(False, "running", MessageCounts([], {}, {})))))

    thread = threading.Thread(target=rank, daemon=True)
    thread.start()
    assert Call(SimpleNamespace(keeper=keeper), [one], "ready").wait() == {0: None}
    thread.join()


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="there are no real-time signals")
def test_a_signal_without_a_name_is_named_by_its_number():
    number = signal.SIGRTMIN + 6
    with pytest.raises(minipar.RankError, match=f"its process was killed by signal {number}$"):
        minipar.run(lambda world: os.kill(os.getpid(), number), world_size=1)


def test_a_rank_that_died_between_two_runs_is_replaced():
    pids = minipar.run(lambda world: os.getpid(), world_size=2)
    os.kill(pids[1], signal.SIGKILL)
    connection.wait([launch._pools["gloo"].keeper])  # on which the fork server says so
    assert not set(pids) & set(minipar.run(lambda world: os.getpid(), world_size=2))


# Programs that end, in every way a program can ------------------------------------------------------------------

WAITING = """
import threading, minipar

def wait(world):
    world.report("started")
    threading.Event().wait()

minipar.run(wait, world_size=2, on_report=lambda rank, value: print(value, flush=True))
"""


@pytest.mark.thorough
def test_an_uncaught_rank_error_ends_the_program_and_its_ranks(tmp_path):
    program = Program(tmp_path, "import minipar\nminipar.run(lambda world: 1 / world.rank, world_size=2)")
    status, _, err = program.finish()
    assert status == 1
    assert "ZeroDivisionError" in err
    assert err.rstrip().splitlines()[-1].startswith("  rank 1:")
    assert program.leftovers() == []


def test_ctrl_c_in_the_middle_of_a_run_ends_every_process_quietly(tmp_path):
    program = Program(tmp_path, WAITING)
    assert program.read_line() == "started\n"
    os.killpg(program.process.pid, signal.SIGINT)  # as a terminal does: to the program and to its ranks
    status, _, err = program.finish()
    assert status == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    assert program.leftovers() == []


@pytest.mark.thorough
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_a_caller_that_is_killed(tmp_path, how):
    program = Program(tmp_path, WAITING)
    assert program.read_line() == "started\n"
    program.process.send_signal(how)
    assert program.finish()[0] == -how
    assert program.leftovers() == []
