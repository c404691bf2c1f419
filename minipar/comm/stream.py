"""A Comm is a stream: its operations run one after another, in the order in which they were called.

On a CPU the stream is a thread, started when the first asynchronous operation needs it; a synchronous operation on an
idle stream runs in the caller's own thread. On CUDA it is a CUDA stream, and waiting makes the current stream wait,
not the host. This is NCCL's mental model, so a program that is correct here is correct there.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch


class Handle:
    """The promise of an asynchronous operation: `wait()` returns its result, or raises what it raised."""

    def __init__(self, on_wait: Callable[[float, float], None] | None = None):
        self.finished = threading.Event()
        self._on_wait = on_wait  # told when a wait began and ended, for the trace
        self._result = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self):
        if not self.finished.is_set():
            start_s = time.perf_counter()
            self.finished.wait()
            if self._on_wait is not None:
                self._on_wait(start_s, time.perf_counter())
        if self._error is not None:
            raise self._error
        return self._result

    def run(self, operation: Callable) -> None:
        try:
            self._result = operation()
        except BaseException as error:
            self._error = error
        self.finished.set()


class StreamThread(threading.Thread):
    """Takes (handle, operation) pairs from a queue until it finds None."""

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self.operations: queue.SimpleQueue = queue.SimpleQueue()

    def run(self):
        while (item := self.operations.get()) is not None:
            handle, operation = item
            handle.run(operation)
            del item, handle, operation  # keep nothing alive while waiting for the next


class ThreadStream:
    """Operations in call order. `run` waits for the result, `submit` returns a Handle.

    A stream belongs to the thread that used it first. Two threads calling in an order that differs between ranks would
    receive each other's messages, so a second thread is refused; autograd's threads and streams act for their caller.
    """

    def __init__(self, name: str):
        self.name = name
        self._owner: int | None = None
        self._inline: int | None = None  # the thread that is in the middle of an operation by itself
        self._thread: StreamThread | None = None
        self._last: threading.Event | None = None  # not its handle, which would keep its result alive

    def inside(self) -> bool:
        """Is the calling thread in the middle of an operation of this stream?"""
        me = threading.get_ident()
        return me == self._inline or (self._thread is not None and me == self._thread.ident)

    def idle(self) -> bool:
        return self._last is None or self._last.is_set()

    def run(self, operation: Callable, on_wait=None):
        if self.inside():
            return operation()
        self._check_owner()
        if not self.idle():
            return self.submit(operation, on_wait).wait()
        self._inline = threading.get_ident()
        try:
            return operation()
        finally:
            self._inline = None

    def submit(self, operation: Callable, on_wait=None) -> Handle:
        self._check_owner()
        if self._thread is None:
            self._thread = StreamThread(self.name)
            self._thread.start()
            weakref.finalize(self, self._thread.operations.put, None)
        handle = Handle(on_wait)
        self._last = handle.finished
        self._thread.operations.put((handle, operation))
        return handle

    def _check_owner(self) -> None:
        me = threading.get_ident()
        if self._owner == me or acts_for_another():
            return
        if self._owner is None:
            self._owner = me
        else:
            raise RuntimeError(
                f"two threads use {self.name}: their messages could cross. "
                "Give each thread a subgroup with a name of its own"
            )


def acts_for_another() -> bool:
    """Is this thread autograd's, in a backward somebody else called, or a stream's?"""
    return isinstance(threading.current_thread(), StreamThread) or torch._C._current_graph_task_id() != -1


class CudaStream:
    """The same on CUDA: operations are enqueued on a CUDA stream from the calling thread, in call order."""

    def __init__(self, name: str, device: torch.device):
        self.name = name
        self._stream = torch.cuda.Stream(device)
        self._inside = False

    def inside(self) -> bool:
        return self._inside

    def idle(self) -> bool:
        return False  # what is posted must follow what was enqueued before it

    def run(self, operation: Callable, on_wait=None):
        return operation() if self._inside else self.submit(operation).wait()

    def submit(self, operation: Callable, on_wait=None) -> CudaHandle:
        self._stream.wait_stream(torch.cuda.current_stream())  # the input may still be being computed
        self._inside = True
        try:
            with torch.cuda.stream(self._stream):
                result = operation()
                return CudaHandle(self._stream.record_event(), result)
        finally:
            self._inside = False


class CudaHandle:
    """`wait()` makes the current stream wait for the operation; the host goes on."""

    def __init__(self, event, result):
        self._event = event
        self._result = result

    def wait(self):
        current = torch.cuda.current_stream()
        current.wait_event(self._event)
        for x in self._result if isinstance(self._result, tuple | list) else (self._result,):
            if isinstance(x, torch.Tensor):
                x.record_stream(current)  # made on the comm's stream, used on this one
        return self._result
