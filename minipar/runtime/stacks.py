"""The place in the caller's script where a rank is: its main thread's stack, most recent call last.

A rank gives it itself, from another thread; or, where its main thread keeps the interpreter to itself (a loop in C) or
the process is stopped, a signal handler writes it. Both are faulthandler's work, which leaves out what is beyond 100 calls.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading
import time
import traceback

import minipar.comm
from minipar.runtime.caller import is_own

Frame = tuple[str, int, str]  # file, line number, function

_COMM = os.path.dirname(minipar.comm.__file__) + os.sep
_OUTERMOST = (os.path.join(os.path.dirname(__file__), "worker.py"), "_call")  # it calls the caller's function
_HEADER = "(most recent call first):\n"
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):\n")
_DUMPED = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def all_stacks() -> dict[int, list[Frame]]:
    """Return the stack of every thread, by ident.

    By faulthandler, which lets no thread run while it looks. Between two steps of a walk in Python the thread would run on,
    its frames be gone, and CPython 3.11 take what lies there now for a frame, or crash.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        _, *parts = _THREAD.split(file.read().decode(errors="replace"))
    return {int(ident, 16): _frames(text) for ident, text in zip(parts[::2], parts[1::2])}


def main_stack() -> list[Frame]:
    """Return the main thread's stack, from the caller's function on."""
    return _of_caller(all_stacks().get(threading.main_thread().ident, []))


def read_dump(pipe, timeout_s: float) -> list[Frame]:
    """Read the main thread's stack, from the caller's function on, from the stacks that faulthandler writes into `pipe`.

    It writes the last call first, and every thread's; in the main thread's, this package calls the caller's function. What
    has come by the deadline counts, as faulthandler leaves out what is beyond 100 calls.
    """
    text, deadline = "", time.monotonic() + timeout_s
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
    """Name a place as `script.py:12 in work`."""
    file, line, name = frame
    return f"{os.path.basename(file)}:{line} in {name}"


def own_line(stack: list[Frame]) -> str:
    """Name the innermost line of the caller's own code; empty if there is none."""
    return next((place(frame) for frame in reversed(stack) if is_own(frame[0])), "")


def inside_comm(stack: list[Frame]) -> bool:
    """Return whether a function of a Comm is running, such as a send, a collective or the wait for one."""
    return any(file.startswith(_COMM) for file, *_ in stack)


def as_text(stack: list[Frame]) -> str:
    """Return the stack as a traceback has it."""
    frames = [(file, line, name, None) for file, line, name in stack]
    return "".join(traceback.StackSummary.from_list(frames).format()).rstrip()
