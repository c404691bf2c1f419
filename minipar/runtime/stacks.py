"""The place in the caller's script where a rank is: its main thread's stack, most recent call last.

A rank normally sends the stack itself, from another thread. If its main thread holds the interpreter (a loop in C) or the
process is stopped, a signal handler writes the stack, by faulthandler, which leaves out calls beyond the 100th.

    from a thread   From Python 3.12 on, this module walks over the frame objects, because faulthandler can crash: if C has
                    called a function whose objects are being freed without the GIL (a file being closed, say), CPython
                    3.13's faulthandler mistakes the memory below the function's frame for a frame.
                    Before Python 3.12, faulthandler does the walk, because a walk over frame objects can crash CPython
                    3.11: between two steps of the walk the other thread could run and free its frames. faulthandler holds
                    the GIL throughout. Python threads are added and removed only with the GIL held, and a thread that has
                    not begun, or is ending, has no frame. The exception is a thread made in C that calls Python for the
                    first time: the thread is added before its entry is complete. A rank on CPU has no such thread, because
                    on the CPU autograd runs in the thread that called it.
    from a signal   The thread that holds the GIL keeps running during the handler. If that is another thread, such as the
                    one that answers the caller, its frames could be freed during a walk over them, and the rank would
                    crash. So the signal goes to the main thread, and its handler walks over that thread's frames only.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from functools import cache
from multiprocessing.connection import Connection
from types import FrameType
from typing import IO

from minipar.runtime.caller import is_own

Frame = tuple[str, int, str]  # file, line number, function

_ROOMS = os.path.dirname(os.path.dirname(__file__))
_COMM = os.path.join(_ROOMS, "comm", "")
# The frame that calls the caller's function.
_OUTERMOST = (os.path.join(os.path.dirname(__file__), "worker.py"), "_call")
_HEADER = "(most recent call first):\n"
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):\n")
_dump_lock = threading.Lock()
_DUMPED = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def all_stacks() -> dict[int, list[Frame]]:
    """Return the stack of every thread, by ident."""
    if sys.version_info >= (3, 12):
        return {ident: _walked(frame) for ident, frame in sys._current_frames().items()}
    with _dump_lock:
        file = _dump_file()
        file.seek(0)
        file.truncate()
        faulthandler.dump_traceback(file)
        file.seek(0)
        _, *parts = _THREAD.split(file.read().decode(errors="replace"))
    return {int(ident, 16): _frames(text) for ident, text in zip(parts[::2], parts[1::2])}


@cache
def _dump_file() -> IO[bytes]:
    """Return faulthandler's file, which stays open: a process asked for its stack may have no descriptor left."""
    return tempfile.TemporaryFile()  # noqa: SIM115


def _walked(frame: FrameType | None) -> list[Frame]:
    stack = []
    while frame is not None:
        stack.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return stack[::-1]


def write_on_signal(signum: int, file: int) -> None:
    """Let a signal write the stack of the thread that it interrupts, and of no other, into a file descriptor."""
    faulthandler.register(signum, file=file, all_threads=False)


def signal_main_thread(pid: int, signum: int) -> None:
    """Send a signal to the main thread of a process, if it has not ended.

    A signal sent to a whole process may be delivered to any of its threads if the process is stopped. On Linux the main
    thread's id is the process's; elsewhere the signal is sent to the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).tgkill(pid, pid, signum)
    else:
        with contextlib.suppress(OSError):
            os.kill(pid, signum)


def main_stack() -> list[Frame]:
    """Return the main thread's stack, from the caller's function on."""
    return _of_caller(all_stacks().get(threading.main_thread().ident or 0, []))


def read_dump(pipe: Connection, timeout_s: float) -> list[Frame]:
    """Read the main thread's stack from `pipe`, into which the handler of `write_on_signal` writes it.

    The stack begins at the caller's function. faulthandler writes the innermost call first, so reading stops at the frame
    that calls the caller's function, or at the "..." that faulthandler writes after 100 calls. Returns [] if the stack is
    not complete within timeout_s. The pipe may begin with the end of another rank's stack.
    """
    text = ""
    deadline = time.monotonic() + timeout_s
    while pipe.poll(max(0.0, deadline - time.monotonic())):
        text += os.read(pipe.fileno(), 1 << 16).decode(errors="replace")
        for thread in text.split(_HEADER):
            stack = _frames(thread)
            if "\n  ..." in thread or any((file, name) == _OUTERMOST for file, _, name in stack):
                return _of_caller(stack)
    return []


def _frames(dumped: str) -> list[Frame]:
    return [(file, int(line), name) for file, line, name in _DUMPED.findall(dumped)][::-1]


def _of_caller(stack: list[Frame]) -> list[Frame]:
    own = [i for i, (file, _, name) in enumerate(stack) if (file, name) == _OUTERMOST]
    return stack[own[0] + 1 :] if own else stack


def place(frame: Frame) -> str:
    """Format a frame as `script.py:12 in work`, or as `line 12 of a notebook's cell, in work`."""
    file, line, name = frame
    if os.path.basename(os.path.dirname(file)).startswith(
        "ipykernel_"
    ):  # the file's name is a hash of the cell
        return f"line {line} of a notebook's cell, in {name}"
    return f"{os.path.basename(file)}:{line} in {name}"


def own_line(stack: list[Frame]) -> str:
    """Name the innermost line of the caller's own code; empty if there is none."""
    return next((place(frame) for frame in reversed(stack) if is_own(frame[0])), "")


def inside_comm(stack: list[Frame]) -> bool:
    """Return whether a function of a Comm is running, such as a send, a collective or the wait for one."""
    return any(file.startswith(_COMM) for file, *_ in stack)


def as_text(stack: list[Frame]) -> str:
    """Return the stack as text, formatted like a traceback."""
    frames = [(file, line, name, None) for file, line, name in stack]
    return "".join(traceback.StackSummary.from_list(frames).format()).rstrip()
