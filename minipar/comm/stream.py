"""The stream of a Comm: runs its operations one after another, in the order in which they were called.

On CPU the stream is a thread, started by the first asynchronous operation; a synchronous operation on an idle stream runs
in the calling thread. On CUDA it is a CUDA stream (cuda_stream.py), and waiting makes the current stream wait, not the
host. This is NCCL's model, so a program that is correct on CPU is correct with NCCL.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch

# thread -> the message or operation it waits for, for the explanation of a blocked rank
Waits = dict[int, object]


class Handle:
    """Handle of an asynchronous operation: `wait()` returns its result, or raises its exception."""

    def __init__(self, name: str = "operation", waits: Waits | None = None, on_wait: Callable | None = None):
        self.finished = threading.Event()
        self._name, self._waits = name, {} if waits is None else waits
        self._on_wait = on_wait  # called with the start and the end of a wait, for the trace
        self._result = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self):
        if not self.finished.is_set():
            thread, start_s = threading.get_ident(), time.perf_counter()
            self._waits[thread] = self._name
            self.finished.wait()
            self._waits.pop(thread, None)
            if self._on_wait is not None:
                self._on_wait(start_s, time.perf_counter())
        if self._error is not None:
            raise self._error
        return self._result

    @classmethod
    def finished_with(cls, result) -> Handle:
        """Return the handle of an operation that has finished with this result."""
        handle = cls()
        handle._result = result
        handle.finished.set()
        return handle

    def run(self, operation: Callable) -> None:
        try:
            self._result = operation()
        except BaseException as error:
            self._error = error
        self.finished.set()


class StreamThread(threading.Thread):
    """A thread that runs (handle, operation) pairs from a queue until it receives None."""

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self.operations: queue.SimpleQueue = queue.SimpleQueue()

    def run(self):
        while (item := self.operations.get()) is not None:
            handle, operation = item
            handle.run(operation)
            del item, handle, operation  # or their tensors stay alive until the next operation


class ThreadStream:
    """A CPU stream, which runs operations in call order. `run` waits for the result, `submit` returns a Handle.

    A stream belongs to the first thread that uses it; calls from a second thread raise RuntimeError. If two threads called
    in an order that differs between ranks, they would receive each other's messages. Threads of autograd and of other
    streams are allowed, as they act for the thread that called them; but none while another one is inside.
    """

    def __init__(self, name: str, waits: Waits | None = None):
        self.name, self._waits = name, waits
        self._owner: threading.Thread | None = None
        self._inline_thread: int | None = None  # the calling thread, while it runs an operation itself
        self._thread: StreamThread | None = None
        # of the last operation submitted; not its handle, which would keep the result alive
        self._last_finished: threading.Event | None = None

    def inside(self) -> bool:
        """Return whether the calling thread is inside an operation of this stream."""
        me = threading.get_ident()
        return me == self._inline_thread or (self._thread is not None and me == self._thread.ident)

    def idle(self) -> bool:
        return self._last_finished is None or self._last_finished.is_set()

    def drain(self) -> None:
        """Wait until all operations have ended."""
        if self._last_finished is not None:
            last = Handle(f"the operations of {self.name}", self._waits)
            last.finished = self._last_finished
            last.wait()

    def lane(self) -> str:
        """Return the trace's lane of what runs now: that of this thread."""
        thread = threading.current_thread()
        return "main" if thread is threading.main_thread() else thread.name

    def run(self, operation: Callable, on_wait=None, what: str = "an operation"):
        if self.inside():
            return operation()
        self._check_owner()
        if not self.idle():
            return self.submit(operation, on_wait, what).wait()
        self._inline_thread = threading.get_ident()
        try:
            return operation()
        finally:
            self._inline_thread = None

    def submit(self, operation: Callable, on_wait=None, what: str = "an operation") -> Handle:
        self._check_owner()
        if self._thread is None:
            self._thread = StreamThread(self.name)
            self._thread.start()
            weakref.finalize(self, self._thread.operations.put, None)
        handle = Handle(f"{what} of {self.name}", self._waits, on_wait)
        self._last_finished = handle.finished
        self._thread.operations.put((handle, operation))
        return handle

    def _check_owner(self) -> None:
        here = threading.current_thread()
        if self._inline_thread is not None:  # a caller is inside, and not this one
            raise RuntimeError(
                f"thread {here.name!r} uses {self.name} while another thread is inside an operation of it: their messages "
                "could cross. Give each stream a subgroup with a name of its own"
            )
        if self._owner is here or acts_for_caller(here):
            return
        if self._owner is not None:
            raise RuntimeError(
                f"two threads use {self.name}, {self._owner.name!r} and {here.name!r}: their messages could cross. "
                "Give each thread a subgroup with a name of its own"
            )
        self._owner = here


def acts_for_caller(thread: threading.Thread) -> bool:
    """Return whether this thread, the running one, is the thread of a stream, or one that autograd started for a backward.

    A thread that the program has started does not act for another one, whether it runs a backward or not.
    """
    started_by_autograd = (
        isinstance(thread, threading._DummyThread) and torch._C._current_graph_task_id() != -1
    )
    return isinstance(thread, StreamThread) or started_by_autograd


def run_recorded(trace, name: str, stream, operation: Callable):
    """Run the operation, and record its span in the trace, on the lane of the stream."""
    with trace.span("communicate", name, stream.lane()):
        return operation()
