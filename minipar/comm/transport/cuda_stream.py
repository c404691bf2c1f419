"""The stream of a Comm on CUDA: operations are enqueued on a CUDA stream from the calling thread, in call order.

    submit   the Comm's stream waits for the caller's stream, which may still be computing the input
    wait     the caller's stream waits for the Comm's stream; the host does not wait

A freed tensor's memory goes back to the stream that allocated it, and may be reused while another stream still reads it. So
an operation keeps its inputs until it has ended or its caller's stream has waited for it, and its result is marked as used
by the stream that waited.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from minipar.comm.transport.messages import ChannelId
from minipar.comm.transport.stream import OnWait, Operation
from minipar.comm.transport.watch import Watch


class CudaStream:
    """A stream with the interface of `ThreadStream`. No method blocks the host.

    watch  the Watch that reports operations that do not end, or None
    cuda   torch.cuda, or a stand-in for it
    """

    def __init__(
        self, key: ChannelId, device: torch.device, watch: Watch | None = None, cuda: Any = torch.cuda
    ):
        self._key = key
        self._watch = watch
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._inside = False
        self._under_way: deque[CudaHandle] = deque()

    def inside(self) -> bool:
        return self._inside

    def idle(self) -> bool:
        return False  # an operation must always run on the stream, after the operations enqueued before it

    def lane(self) -> str:
        """Return the trace's lane for operations on this stream."""
        return str(self._key)

    def run(self, operation: Operation, on_wait: OnWait | None = None, what: str = "an operation") -> Any:
        return operation() if self._inside else self.submit(operation, on_wait, what).wait()

    def submit(
        self, operation: Operation, on_wait: OnWait | None = None, what: str = "an operation"
    ) -> CudaHandle:
        self._let_go()
        caller = self._cuda.current_stream()
        self._stream.wait_stream(caller)
        begin = self._stream.record_event()
        self._inside = True
        try:
            with self._cuda.stream(self._stream):
                result = operation()
                event = self._stream.record_event()
                handle = CudaHandle(event, result, operation, caller, on_wait, self._cuda)
        finally:
            self._inside = False
        self._under_way.append(handle)
        if self._watch is not None:
            self._watch.add(what, self._key, begin, handle.event)
        return handle

    def _let_go(self) -> None:
        while self._under_way and self._under_way[0].finished():
            self._under_way.popleft().inputs = None


class CudaHandle:
    """Handle of an operation: `wait()` returns its result and makes the current stream, not the host, wait for it.

    inputs  the operation's inputs, kept until it has ended or its caller's stream has waited for it
    """

    def __init__(
        self,
        event: Any,
        result: Any,
        inputs: object,
        caller: Any,
        on_wait: OnWait | None = None,
        cuda: Any = torch.cuda,
    ):
        self.event = event
        self.inputs = inputs
        self._result = result
        self._caller = caller
        self._on_wait = on_wait
        self._cuda = cuda

    def finished(self) -> bool:
        return self.inputs is None or bool(self.event.query())

    def wait(self) -> Any:
        current = self._cuda.current_stream()
        if self._on_wait is None:
            current.wait_event(self.event)
        else:
            start = current.record_event(self._timed())
            current.wait_event(self.event)
            self._on_wait(start, current.record_event(self._timed()))
            self._on_wait = None
        for x in self._result if isinstance(self._result, tuple | list) else (self._result,):
            if isinstance(x, torch.Tensor):
                x.record_stream(current)  # x was allocated on the Comm's stream, and is used on this one
        if current == self._caller:
            self.inputs = None
        return self._result

    def _timed(self) -> Any:
        return self._cuda.Event(enable_timing=True)
