"""What ranks print arrives at the caller with the rank, by whatever way they print it."""

import ctypes
import faulthandler
import os
import subprocess
import sys

import pytest

import minipar


def shown(capsys, fn, world_size=1):
    minipar.run(fn, world_size=world_size)
    return capsys.readouterr().out.splitlines()


def test_bytes_children_and_file_descriptors_print_too(capsys):
    def say(world):
        sys.stdout.buffer.write(b"bytes\n")
        sys.stdout.flush()
        subprocess.run(["echo", "a child's"], stdout=sys.stdout, check=True)
        os.write(1, "Größe\n".encode())

    for rank in range(2):
        lines = [line for line in shown(capsys, say, world_size=2) if line.startswith(f"[rank {rank}]")]
        assert lines == [f"[rank {rank}] {text}" for text in ("bytes", "a child's", "Größe")]


def test_every_state_of_a_progress_bar_is_a_line(capsys):
    def progress(world):
        for state in ("\r 50%", "\r100%"):
            print(state, end="", flush=True)
        print("\n\ndone")

    assert shown(capsys, progress) == ["[rank 0]  50%", "[rank 0] 100%", "[rank 0] ", "[rank 0] done"]


def test_more_than_a_pipe_holds_arrives_whole(capsys):
    lines = shown(capsys, lambda world: print("\n".join(str(n) * 10 for n in range(50_000))))
    assert lines == [f"[rank 0] {str(n) * 10}" for n in range(50_000)]


def test_what_was_printed_before_a_report_is_shown_before_it(capsys):
    def work(world):
        for step in range(20):
            print("printed", step)
            world.report(step)

    minipar.run(work, world_size=1, on_report=lambda rank, step: print("reported", step))
    lines = capsys.readouterr().out.splitlines()
    printed, reported = ([f"{start} {n}" for n in range(20)] for start in ("[rank 0] printed", "reported"))
    assert [line for line in lines if line in printed] == printed
    assert [line for line in lines if line in reported] == reported
    assert all(map(lambda before, after: lines.index(before) < lines.index(after), printed, reported))


def test_a_crash_shows_its_stack(capsys):
    def read_nothing(world):
        faulthandler.enable()  # may be asked for, and is on anyway
        ctypes.string_at(0)

    minipar.shutdown()  # a fresh rank: where there are over 100 threads, faulthandler leaves out the oldest, the main one
    with pytest.raises(minipar.RankError, match="was killed by SIGSEGV"):
        minipar.run(read_nothing, world_size=1)
    lines = capsys.readouterr().err.splitlines()
    assert "[rank 0] Fatal Python error: Segmentation fault" in lines
    assert any("in read_nothing" in line for line in lines), lines
