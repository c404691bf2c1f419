"""The threads of a rank: which may still act while the main thread waits for a message."""

from __future__ import annotations

import concurrent.futures.thread
import sys
import threading
from collections.abc import Collection
from types import FrameType

from minipar.comm.stream import StreamThread
from minipar.runtime.stacks import Frame, all_stacks, own_line, place

# What a thread is in while it waits for another one of its process: these functions, and these if they have no timeout.
_IDLE_IN = {StreamThread.run.__code__, concurrent.futures.thread._worker.__code__}
_IDLE_WITHOUT_TIMEOUT = {"wait", "join", "_wait_for_tstate_lock"}


def busy_threads(waiting: Collection[int]) -> list[str]:
    """Say which threads run and where, but for the main thread, the calling one, and those whose idents are `waiting`.

    A thread that waits for another thread's lock, queue or end, without a timeout, does not run. One that sleeps or waits
    with a timeout does: it may go on by itself, and send what another rank waits for.
    """
    without = {threading.get_ident(), threading.main_thread().ident, *waiting}
    frames = sys._current_frames()
    others = [t for t in threading.enumerate() if t.ident in frames.keys() - without]
    busy = [(t, frames[t.ident]) for t in others if not _idle(frames[t.ident])]
    stacks = all_stacks() if busy else {}
    return [f"thread {t.name!r} runs ({_place(stacks.get(t.ident), frame)})" for t, frame in busy]


def _idle(frame: FrameType) -> bool:
    code = frame.f_code
    waits = code.co_filename == threading.__file__ and code.co_name in _IDLE_WITHOUT_TIMEOUT
    return code in _IDLE_IN or (waits and frame.f_locals.get("timeout") in (None, -1))


def _place(stack: list[Frame] | None, innermost: FrameType) -> str:
    code = innermost.f_code
    return own_line(stack or []) or place((code.co_filename, innermost.f_lineno, code.co_name))
