"""The threads of a rank: which may still act while the main thread waits for a message."""

from __future__ import annotations

import concurrent.futures.thread
import sys
import threading
from collections.abc import Collection
from types import FrameType

from minipar.comm.transport.stream import StreamThread
from minipar.runtime.stacks import Frame, all_stacks, own_line, place

# A thread that waits for another thread of its process is inside one of these functions. The second set counts only where
# no timeout was given.
_IDLE_IN = {StreamThread.run.__code__, concurrent.futures.thread._worker.__code__}
_IDLE_WITHOUT_TIMEOUT = {"wait", "join", "_wait_for_tstate_lock"}
# The first bar of tqdm in a process starts this thread, which redraws bars for ever, and sends nothing.
_REDRAWS = "tqdm_monitor"


def busy_threads(waiting: Collection[int]) -> list[str]:
    """Say which threads run and where, except the main thread, the calling thread, and threads with idents in `waiting`.

    A thread that waits, without a timeout, for another thread's lock, queue or end does not count as running. A thread that
    sleeps or waits with a timeout does: it may continue by itself, and send a message that another rank waits for.
    """
    without = {threading.get_ident(), threading.main_thread().ident, *waiting}
    frames = sys._current_frames()
    # This function's own frame would make a cycle that keeps every thread's variables until the garbage collector runs.
    del frames[threading.get_ident()]
    names = {t.ident: t.name for t in threading.enumerate() if t.ident is not None and t.name != _REDRAWS}
    busy = [i for i in names if i in frames and i not in without and not _idle(frames[i])]
    stacks = all_stacks() if busy else {}
    return [f"thread {names[i]!r} runs ({_place(stacks.get(i), frames[i])})" for i in busy]


def _idle(frame: FrameType) -> bool:
    code = frame.f_code
    waits = code.co_filename == threading.__file__ and code.co_name in _IDLE_WITHOUT_TIMEOUT
    return code in _IDLE_IN or (waits and frame.f_locals.get("timeout") in (None, -1))


def _place(stack: list[Frame] | None, innermost: FrameType) -> str:
    code = innermost.f_code
    return own_line(stack or []) or place((code.co_filename, innermost.f_lineno, code.co_name))
