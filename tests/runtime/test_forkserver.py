"""Ranks and their children end with their caller, whatever either is doing; and a caller may have threads and forks."""

import gc
import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import minipar
from minipar.runtime import launch
from tests.programs import Program

# A program that says where it is: the fork server has been started, has imported torch, has been asked for ranks.
STARTING = """
import minipar
from minipar.runtime import launch
from minipar.runtime.forkserver import ForkServer

class Told(ForkServer):
    def start(self, *args):
        print("importing", flush=True)
        if STOP_AT != "importing":
            self._control.recv(1, 2)
        print("imported", flush=True)
        super().start(*args)
        print("asked", flush=True)

launch.ForkServer = Told
"""
PLACES = ["importing", "imported", "asked"]


def read_until(program, line):
    while (said := program.read_line()) != f"{line}\n":
        assert said, program.finish()


def test_a_ranks_collector_does_not_search_what_all_ranks_share():
    for frozen, searched in minipar.run(
        lambda world: (gc.get_freeze_count(), len(gc.get_objects())), world_size=2
    ):
        assert frozen > 100_000  # the objects of torch's modules
        assert searched < frozen


@pytest.mark.thorough
@pytest.mark.parametrize("place", PLACES)
def test_a_caller_killed_while_its_pool_starts_leaves_nothing(tmp_path, place):
    program = Program(tmp_path, f"STOP_AT = {place!r}{STARTING}minipar.run(lambda world: None, world_size=3)")
    read_until(program, place)
    program.process.kill()
    assert program.finish()[0] == -signal.SIGKILL
    assert program.survivors() == []
    assert program.leftovers() == []


@pytest.mark.thorough
@pytest.mark.parametrize("place", PLACES)
def test_after_ctrl_c_at_startup_nothing_is_left_and_runs_work(tmp_path, place):
    program = Program(
        tmp_path,
        f"STOP_AT = {place!r}{STARTING}"
        """
try:
    minipar.run(lambda world: __import__("time").sleep(60), world_size=3)
except KeyboardInterrupt as error:
    kept = error  # with its frames, and what is in them
    print("interrupted")
print(minipar.run(lambda world: world.rank, world_size=3))
""",
    )
    read_until(program, place)
    os.killpg(program.process.pid, signal.SIGINT)
    status, out, err = program.finish()
    assert (status, out.splitlines()[-1]) == (0, "[0, 1, 2]"), err
    assert "interrupted\n" in out
    assert program.survivors() == []
    assert program.leftovers() == []


@pytest.mark.thorough
def test_unresponsive_ranks_and_children_end_with_their_caller(tmp_path):
    """Rank 0 keeps the interpreter to itself, rank 1 is stopped, each has a child; a fork of the caller lives on."""
    program = Program(
        tmp_path,
        """
        import itertools, os, signal, subprocess, sys, time, minipar

        def busy(world):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            world.report(world.rank)
            if world.rank == 0:
                sum(itertools.repeat(1))
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            child.wait()

        def on_report(rank, value):
            if rank == 2 and os.fork() == 0:
                os.close(1), os.close(2)
                time.sleep(3)
                os._exit(0)
            print(value, flush=True)

        minipar.run(busy, world_size=3, on_report=on_report)
        """,
    )
    assert sorted(program.read_line() for _ in range(3)) == ["0\n", "1\n", "2\n"]
    program.process.kill()
    assert program.finish()[0] == -signal.SIGKILL
    assert program.survivors() == []
    assert program.leftovers() == []


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_end_of(pid: int) -> None:
    deadline = time.monotonic() + 30
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("ends", ["with the pool", "by itself"])
def test_the_children_of_a_rank_end_with_it(ends):
    def start_child(world):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
        world.report(child.pid)
        if ends == "by itself":
            os._exit(3)

    pids = []
    if ends == "by itself":
        with pytest.raises(minipar.RankError, match="exit code 3"):
            minipar.run(start_child, world_size=1, on_report=lambda rank, pid: pids.append(pid))
    else:
        minipar.run(start_child, world_size=1, on_report=lambda rank, pid: pids.append(pid))
        assert alive(*pids)
        with pytest.raises(minipar.RankError):
            minipar.run(lambda world: 1 / 0, world_size=1)
    wait_for_end_of(*pids)
    assert not alive(*pids)


def test_a_data_loader_with_workers_runs_on_a_rank():
    def total(world):
        print("loading")
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2)
        return sum(batch.sum().item() for (batch,) in loader)

    assert minipar.run(total, world_size=2) == [28.0, 28.0]


@pytest.mark.thorough
def test_a_forked_child_gets_its_own_pools_not_its_parents(tmp_path):
    program = Program(
        tmp_path,
        """
        import os, sys, minipar

        def run_in_child():
            ranks = minipar.run(lambda world: (world.rank, os.getpid()), world_size=2)
            print([rank for rank, _ in ranks], {pid for _, pid in ranks}.isdisjoint(pids), flush=True)

        def slow(world):
            world.report(None)
            world.barrier()
            return os.getpid()

        def fork(*_):
            child = os.fork()
            if child == 0:
                if forked:  # the second child; the first one only exits
                    run_in_child()
                sys.exit(0)
            forked.append(os.waitpid(child, 0)[1])

        pids, forked = minipar.run(lambda world: os.getpid(), world_size=2), []
        print(minipar.run(slow, world_size=2, on_report=fork) == pids, forked, flush=True)
        """,
    )
    status, out, err = program.finish()
    assert (status, out) == (0, "[0, 1] True\nTrue [0, 0]\n"), err
    assert program.survivors() == []
    assert program.leftovers() == []


@pytest.mark.thorough
def test_of_concurrent_runs_one_runs_and_the_script_stays_main(tmp_path):
    program = Program(
        tmp_path,
        """
        import pickle, threading, minipar

        class Mine:
            pass

        def call():
            try:
                said.append(minipar.run(lambda world: world.size, world_size=2))
            except ValueError as error:
                said.append(str(error))

        said, threads = [], [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pickle.dumps(Mine())
        print(*sorted(said, key=str)[0], sum("another one is under way" in str(answer) for answer in said))
        """,
    )
    status, out, err = program.finish()
    assert (status, out) == (0, "2 2 2\n"), err
    assert program.survivors() == []
    assert program.leftovers() == []


@pytest.mark.thorough
def test_a_run_on_another_thread_than_the_first_works():
    """Also where the thread that started the fork server has ended."""
    from concurrent.futures import ThreadPoolExecutor

    launch._end_all()
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(minipar.run, lambda world: world.rank, world_size=2).result() == [0, 1]


@pytest.mark.thorough
def test_the_path_of_the_folder_for_temporary_files_may_be_long(tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    program = Program(folder, "import minipar\nprint(minipar.run(lambda world: world.size, world_size=2))")
    status, out, err = program.finish()
    assert (status, out) == (0, "[2, 2]\n"), err
    assert program.leftovers() == []


@pytest.mark.thorough
def test_a_killed_fork_server_is_reported_and_the_next_run_works():
    def kill_server(rank, value):
        os.kill(launch._servers[0]._process.pid, signal.SIGKILL)

    def wait(world):
        world.report(None)
        time.sleep(60)

    with pytest.raises(minipar.RankError, match="ended with the fork server, which something has killed"):
        minipar.run(wait, world_size=1, on_report=kill_server)
    assert not launch._servers[0].alive()
    assert minipar.run(lambda world: world.rank, world_size=2) == [0, 1]


DETACHED = """
import minipar, subprocess

def work(world):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    subprocess.Popen(["sh", "-c", "setsid sleep 600 & exit 0"]).wait()

minipar.run(work, world_size=2)
print("ran", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="needs a child subreaper")
@pytest.mark.parametrize("killed", [False, True])
def test_children_in_sessions_of_their_own_end_with_the_caller(tmp_path, killed):
    program = Program(tmp_path, DETACHED + ("import time; time.sleep(600)" if killed else ""))
    read_until(program, "ran")
    if killed:
        program.process.kill()
    program.process.wait()
    assert program.survivors(timeout_s=20) == []
