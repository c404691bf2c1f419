"""Whatever a learner's file does, the check says one line about it, with its own line, and harms no later one."""

import re
import sys
from textwrap import dedent

import pytest

import minipar
from minipar.learn.exercises import check
from minipar.learn.exercises.check import MOST_CHARACTERS, MOST_LINES, printing_little

RIGHT = """
def shift(comm, x):
    return comm.exchange(x, (comm.rank + 1) % comm.size, x.shape, x.dtype, (comm.rank - 1) % comm.size)
"""
BAD = {
    "a syntax error": (
        "def shift(comm, x)\n    return x",
        "file",
        r"shift.py, line 1: SyntaxError: expected ':'",
    ),
    "indentation": ("def shift(comm, x):\nreturn x", "file", r"shift.py, line 2: IndentationError"),
    "no text": ("\0", "file", r"shift.py.*null bytes"),
    "no such function": (
        "def shfit(comm, x): pass",
        "file",
        r"defines no shift.*did you mean it by shfit \(shift.py, line 1\)",
    ),
    "an empty file": ("", "file", r"shift.py defines no shift: it should have `def shift\(comm, x\)`"),
    "no function": ("\nshift = 3", "file", r"shift.py, line 2: shift is a int"),
    "another signature": (
        "\ndef shift(x): pass",
        "file",
        r"shift.py, line 2: shift cannot be called so: too many positional",
    ),
    "one argument more": (
        "def shift(comm, x, y): pass",
        "file",
        r"shift.py, line 1: shift cannot be called so: missing .* 'y'",
    ),
    "no such import": (
        "import no_such_module",
        "file",
        r"ModuleNotFoundError: No module named .* \(shift.py, line 1\)",
    ),
    "an error at once": (
        "x = 1\nx / 0",
        "file",
        r"raised ZeroDivisionError: division by zero \(shift.py, line 2\)",
    ),
    "an error when called": (
        "def shift(comm, x):\n    return x.no",
        "runs",
        r"rank \d raised AttributeError.*\(shift.py, line 2\)",
    ),
    "a wrong type": (
        "\ndef shift(comm, x): return 3",
        "runs",
        r"it returned a int, not a tensor \(shift.py, line 2\)",
    ),
    "a wrong shape": (
        RIGHT.rstrip() + "[:1]\n",
        "small",
        r"the result has shape \[1\]; it should have \[4\] \(shift.py, line 2\)",
    ),
    "a wrong dtype": (
        RIGHT.rstrip() + ".float()\n",
        "small",
        r"is float32 \[4\]; it should be int64 \[4\] \(shift.py, line 2\)",
    ),
    "a dead process": (
        "import os\ndef shift(comm, x): os._exit(3)",
        "runs",
        r"its process ended with exit code 3 \(shift.py, line 2\)",
    ),
    "a killed process": (
        "import os\ndef shift(comm, x): os.kill(os.getpid(), 9)",
        "runs",
        r"killed by SIGKILL \(shift.py, line 2\)",
    ),
    "an exit": (
        "import sys\ndef shift(comm, x): sys.exit(0)",
        "runs",
        r"raised SystemExit: 0 \(shift.py, line 2\)",
    ),
    "a deadlock": (
        "def shift(comm, x):\n    y = comm.recv(x.shape, x.dtype, 1 - comm.rank)\n    return y",
        "runs",
        r"deadlock: rank 0 waits to receive .*shift.py:2",
    ),
    "a message nobody receives": (
        "def shift(comm, x):\n    comm.send(x, (comm.rank + 1) % comm.size, async_op=True)\n    return x",
        "runs",
        r"not received|deadlock",
    ),
    "a deep expression": (
        f"x = {'not ' * 5000} 1",
        "file",
        r"shift.py cannot be read: maximum recursion depth exceeded",
    ),
}


def checked(tmp_path, source: str, **options):
    (tmp_path / "shift.py").write_text(dedent(source))
    return check("shift", tmp_path, **options)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_explained_in_one_sentence_with_its_own_line(what, tmp_path):
    source, stage, words = BAD[what]
    result = checked(tmp_path, source)
    assert (result.state, result.stage) == ("red", stage), str(result)
    assert re.search(words, result.words.replace("\n", " ")), str(result)
    *full, last = result.words.split(
        "\n"
    )  # one line, which only a long sentence fills, so that it is wrapped
    assert len(full) <= 2, str(result)
    assert all(150 < len(line) <= MOST_CHARACTERS for line in full), str(result)
    assert len(last) <= MOST_CHARACTERS
    assert "Traceback" not in str(result)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "def shift(comm, x):\n    while True:\n        pass",
            r"(2 s of computing|8 s) \(shift.py, line [23]\)",
        ),
        (
            "try:\n    while True: pass\nexcept Exception: pass",
            r"(2 s of computing|8 s) \(shift.py, line 2\)",
        ),
        ("import time\ndef shift(comm, x):\n    time.sleep(1000)", r"8 s \(shift.py, line 3\)"),
    ],
)
def test_a_file_that_hangs_is_stopped_and_told_at_which_line(source, words, tmp_path):
    minipar.run(lambda world: None, world_size=4)  # so that no start of ranks is in the limit
    result = checked(tmp_path, source, limit_s=30.0)
    assert result.state == "red"
    assert re.search(f"is still running after {words}", result.words), str(result)


@pytest.mark.thorough
def test_a_file_that_will_not_stop_is_ended_with_its_processes(tmp_path):
    source = """\
        import signal
        def shift(comm, x):
            signal.signal(signal.SIGPROF, signal.SIG_IGN)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            while True:
                pass
    """
    result = checked(tmp_path, source, limit_s=8.0)
    assert "it did not come to an end within 8 s, and was ended (shift.py, line 2)" in str(result)
    assert checked(tmp_path, RIGHT).state == "green"


def test_the_first_lines_are_shown_and_the_others_counted(capsys):
    with printing_little():
        print("short\n" + "x" * 1000)
        for number in range(MOST_LINES):
            print(number)
    shown = ["short", "x" * MOST_CHARACTERS, *map(str, range(MOST_LINES - 2)), "... and 2 more lines"]
    assert capsys.readouterr().out.splitlines() == shown


@pytest.mark.thorough
def test_what_it_prints_is_cut_short(tmp_path, capsys):
    result = checked(tmp_path, RIGHT.replace("    return", "    print('hello\\n' * 1000)\n    return"))
    assert result.state == "green"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= MOST_LINES + 2
    assert lines[0].endswith("hello")
    assert re.fullmatch(r"\.\.\. and \d+ more lines", lines[-1])


@pytest.mark.thorough
def test_a_flood_without_a_newline_is_cut_short_too(tmp_path, capsys):
    result = checked(tmp_path, RIGHT.replace("    return", "    print('x' * 1_000_000, end='')\n    return"))
    assert result.state == "green"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= MOST_LINES + 2
    assert max(map(len, lines)) <= MOST_CHARACTERS


@pytest.mark.parametrize("text", ["'x' * 10_000_000", "'x\\n' * 1_000_000"])
def test_of_a_long_exception_a_few_lines_are_shown(tmp_path, text):
    result = checked(tmp_path, f"def shift(comm, x):\n    raise ValueError({text})")
    assert result.state == "red"
    lines = result.words.splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= MOST_CHARACTERS
    assert "ValueError" in lines[0]
    assert "(shift.py, line 2)" in " ".join(lines)


def test_a_long_sentence_of_a_verdict_is_wrapped_and_not_cut(tmp_path):
    sentence = " ".join(f"word{number}" for number in range(60))  # about 400 characters
    result = checked(tmp_path, f"def shift(comm, x):\n    raise ValueError({sentence!r})")
    lines = result.words.splitlines()
    assert max(map(len, lines)) <= MOST_CHARACTERS
    assert sentence in " ".join(lines)


def test_what_it_changes_is_gone_in_the_next_check(tmp_path):
    (tmp_path / "helper.py").write_text("def right(comm): return (comm.rank - 1) % comm.size")
    broken = """
        import torch
        torch.Tensor.__add__ = None
        torch.equal = lambda *_: True
        import helper
        def shift(comm, x):
            return x
    """
    assert checked(tmp_path, broken).state == "red"
    assert "helper" not in sys.modules
    assert str(tmp_path) not in sys.path
    (tmp_path / "helper.py").write_text("def right(comm): return (comm.rank + 1) % comm.size")
    with_helper = RIGHT.replace("(comm.rank + 1) % comm.size", "right(comm)")
    assert checked(tmp_path, "from helper import right\n" + with_helper).state == "green"


def test_a_hole_behind_a_finished_part_is_still_to_do(tmp_path):
    (tmp_path / "conjugates.py").write_text(
        "from minipar.simple.autograd import copy, all_reduce, gather_tokens\n"
        "def scatter_tokens(comm, x):\n    raise NotImplementedError"
    )
    result = check("conjugates", tmp_path)
    assert (result.state, result.words) == ("todo", "conjugates.py, line 3: still to be written")
