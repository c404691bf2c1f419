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
from typing import Any, Protocol

from minipar.comm.transport.stream_owner import StreamOwner

# thread -> the message or operation that it waits for, to explain a blocked rank
Waits = dict[int, object]
Operation = Callable[[], Any]
OnWait = Callable[[Any, Any], None]  # called with the start and the end of a wait, for the trace


class Pending(Protocol):
    """Something under way: `wait()` returns its result, or raises its exception."""

    def wait(self) -> Any: ...


class Stream(Protocol):
    """The interface of a Comm's stream. `run` waits for the operation's result, `submit` does not."""

    def run(self, operation: Operation, on_wait: OnWait | None = None, what: str = "") -> Any: ...

    def submit(self, operation: Operation, on_wait: OnWait | None = None, what: str = "") -> Pending: ...

    def inside(self) -> bool:
        """Return whether the calling thread is inside an operation of this stream."""

    def idle(self) -> bool:
        """Return whether all operations have ended, so that the next one may run at once."""

    def lane(self) -> str:
        """Return the trace's lane for the operation that runs now."""


class Handle:
    """Handle of an asynchronous operation: `wait()` returns its result, or raises its exception."""

    def __init__(self, name: str = "operation", waits: Waits | None = None, on_wait: OnWait | None = None):
        self.finished = threading.Event()
        self._name = name
        self._waits: Waits = {} if waits is None else waits
        self._on_wait = on_wait
        self._result: Any = None
        self._error: BaseException | None = None
        self._told = False  # whether a `wait` has raised the error

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self) -> Any:
        if not self.finished.is_set():
            thread = threading.get_ident()
            start_s = time.perf_counter()
            self._waits[thread] = self._name
            try:
                self.finished.wait()
            finally:
                self._waits.pop(thread, None)
            if self._on_wait is not None:
                self._on_wait(start_s, time.perf_counter())
        if self._error is not None:
            self._told = True
            raise self._error
        return self._result

    def untold(self) -> BaseException | None:
        """Return the error, with a note that nobody waited for it, if no `wait` has raised it yet; else None."""
        if self._error is not None and not self._told:
            self._error.add_note(f"This was {self._name}, asynchronous, and nobody has waited for it.")
            return self._error
        return None

    @classmethod
    def finished_with(cls, result: Any) -> Handle:
        """Return the handle of an operation that has finished with this result."""
        handle = cls()
        handle._result = result
        handle.finished.set()
        return handle

    def run(self, operation: Operation) -> None:
        """Keep the operation's result or exception. The caller sets `finished` once it has let go of the operation."""
        try:
            self._result = operation()
        except BaseException as error:
            self._error = error

    def failed(self) -> bool:
        return self._error is not None


class StreamThread(threading.Thread):
    """A thread that runs (handle, operation) pairs from a queue until it gets None; `failed` lists handles that raised."""

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self.failed: list[Handle] = []
        self.operations: queue.SimpleQueue[tuple[Handle, Operation] | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (item := self.operations.get()) is not None:
            handle, operation = item
            handle.run(operation)
            if handle.failed():
                self.failed.append(handle)
            finished = handle.finished
            # Let go of the operation before setting `finished`: the waiting thread may expect that nothing holds its
            # tensors.
            del item, handle, operation
            finished.set()


class ThreadStream:
    """A CPU stream, which runs operations in call order. Calls from a second thread raise RuntimeError: see StreamOwner."""

    def __init__(self, name: str, waits: Waits | None = None):
        self.name = name
        self._waits = waits
        self._owner = StreamOwner(name)
        self._inline_thread: int | None = None  # the calling thread, while it runs an operation itself
        self._thread: StreamThread | None = None
        # Set when the last submitted operation ends. Only the event is kept, since a handle would keep the result alive.
        self._last_finished: threading.Event | None = None

    def inside(self) -> bool:
        me = threading.get_ident()
        return me == self._inline_thread or (self._thread is not None and me == self._thread.ident)

    def idle(self) -> bool:
        return self._last_finished is None or self._last_finished.is_set()

    def run(self, operation: Operation, on_wait: OnWait | None = None, what: str = "") -> Any:
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

    def submit(self, operation: Operation, on_wait: OnWait | None = None, what: str = "") -> Handle:
        self._check_owner()
        if self._thread is None:
            self._thread = StreamThread(self.name)
            self._thread.start()
            weakref.finalize(self, self._thread.operations.put, None)
        handle = Handle(f"{what or 'an operation'} of {self.name}", self._waits, on_wait)
        self._last_finished = handle.finished
        self._thread.operations.put((handle, operation))
        return handle

    def drain(self) -> list[BaseException]:
        """Wait until all operations have ended; return the errors of operations that nobody has waited for."""
        if self._thread is None:
            return []
        last = Handle(f"the operations of {self.name}", self._waits)
        self._thread.operations.put((last, lambda: None))
        last.wait()
        failed, self._thread.failed = self._thread.failed, []
        return [error for handle in failed if (error := handle.untold()) is not None]

    def lane(self) -> str:
        thread = threading.current_thread()
        return "main" if thread is threading.main_thread() else thread.name

    def _check_owner(self) -> None:
        here = threading.current_thread()
        if self._inline_thread is not None or here is not self._owner.thread:
            inside = self._inline_thread is not None
            self._owner.check(here, inside, acts_for_another=isinstance(here, StreamThread))
