"""Ctrl-C and SIGTERM during a run: one line, the usual exit code, and a second signal that ends at once."""

import errno
import os
import signal

import pytest

from minipar import cli
from minipar.cli.signals import SIGNALS, StopRequest
from minipar.support.errors import RankError, Stopped


@pytest.fixture(autouse=True)
def handlers():
    """Give back the handlers that a test changes."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_to_stop_and_the_second_ends(number, handlers, capsys):
    with StopRequest(saves=True) as stop:
        assert not stop()
        stop.in_comparison()
        os.kill(os.getpid(), number)
        assert stop()
        assert f"minipar: {number.name}: saving after this step" in capsys.readouterr().err
        with pytest.raises(Stopped):
            stop.in_comparison()
        with pytest.raises(Stopped, match="^SIGTERM ended the run$"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(number) == signal.SIG_DFL
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers


def test_a_run_that_saves_nothing_ends_at_the_first_signal():
    words = "^SIGTERM ended the run; nothing is saved without --checkpoint-every$"
    with StopRequest(saves=False), pytest.raises(Stopped, match=words):
        os.kill(os.getpid(), signal.SIGTERM)


def test_of_torchruns_ranks_only_rank_0_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with StopRequest(saves=True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
    assert capsys.readouterr().err == ""


SAVE = "Traceback ...\nminipar.support.errors.SaveError: the checkpoint after step 2 could not be written"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "minipar: interrupted"),
        (Stopped("SIGTERM ended the run", signal.SIGTERM), 143, "minipar: SIGTERM ended the run"),
        (Stopped("", signal.SIGTERM), 143, ""),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            "minipar: No space left on device; make room, or w",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "a/b"),
            1,
            "minipar: a/b: Read-only file system; make roo",
        ),
        (RankError(1, SAVE), 1, "minipar: the checkpoint after step 2 could not be written"),
    ],
)
def test_what_ends_a_command_is_one_line_and_its_code(error, code, line, monkeypatch, capsys):
    def work():
        raise error

    monkeypatch.setattr(cli, "_parse", lambda argv: work)
    with pytest.raises(SystemExit) as end:
        cli.main([])
    said = capsys.readouterr().err
    assert end.value.code == code
    assert said.startswith(line)
    assert len(said.splitlines()) == (1 if line else 0)


def test_an_error_of_the_program_keeps_its_traceback(monkeypatch):
    def work():
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    monkeypatch.setattr(cli, "_parse", lambda argv: work)
    with pytest.raises(ConnectionResetError):
        cli.main([])
