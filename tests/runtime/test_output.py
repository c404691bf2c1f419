"""What ranks print arrives at the caller with the rank, by whatever way they print it."""

import ctypes
import faulthandler
import io
import itertools
import os
import subprocess
import sys
import tracemalloc
from multiprocessing import Pipe

import pytest

import minipar
from minipar.runtime.output import Output


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


@pytest.fixture
def written(capsys):
    """written(*parts): the lines that are shown if a rank writes these parts one after another."""
    here, there = Pipe(duplex=False)
    output = Output(here, 0, "stdout")

    def write(*parts: bytes) -> list[str]:
        for part in filter(None, parts):
            os.write(there.fileno(), part)
            output.forward()
        os.write(there.fileno(), b"-\n")  # ends the last line
        output.forward()
        return [line.removeprefix("[rank 0] ") for line in capsys.readouterr().out.splitlines()]

    yield write
    output.close()
    there.close()


def test_shown_output_does_not_depend_on_how_writes_are_split(written):
    """An empty line is shown where there is nothing between two newlines, and no carriage return shows one."""
    for length in range(6):
        for text in map(bytes, itertools.product(b"a\r\n", repeat=length)):
            lines = (text + b"-").decode().split("\n")
            want = [part for line in lines for part in list(filter(None, line.split("\r"))) or [""]]
            for cut in range(max(1, length)):
                assert written(text[:cut], text[cut:]) == want, (text[:cut], text[cut:])


def test_a_long_line_is_not_read_again_whenever_more_of_it_comes():
    """That would take time quadratic in its length. It is seen by the copies that are made."""
    here, there = Pipe(duplex=False)
    output, part, parts = Output(here, 0, "stdout"), b"x" * 50_000, 200
    for _ in range(parts):
        os.write(there.fileno(), part)
        output.forward()
    os.write(there.fileno(), b"y")
    tracemalloc.start()
    try:
        output.forward()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < parts * len(part) / 2  # which is more than the buffer of 1 MiB for what is read
    output.close()
    there.close()


def test_what_the_callers_stream_cannot_encode_is_shown_escaped(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "latin-1"))
    minipar.run(lambda world: print("Größe ≤ 3"), world_size=1)
    assert shown.getvalue() == "[rank 0] Größe \\u2264 3\n".encode("latin-1")


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
