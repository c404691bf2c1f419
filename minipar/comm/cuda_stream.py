"""The stream of a Comm on CUDA: operations are enqueued on a CUDA stream from the calling thread, in call order.

    submit   the Comm's stream waits for the caller's, which may still be computing the input
    wait     the caller's stream waits for the Comm's. The host waits for neither

A tensor's memory goes back to the stream that allocated it, which may hand it out again while another stream still reads
it. So an operation keeps what it was given until it has ended, or its caller's stream has waited for it; and what it
returns is marked as used by the stream that waited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from minipar.comm.messages import ChannelId
from minipar.comm.watch import Watch


class CudaStream:
    """A stream with the interface of `ThreadStream`. No method blocks the host.

    watch  None, or what notices that an operation does not end
    cuda   torch.cuda, or a stand-in for it
    """

    def __init__(self, key: ChannelId, device: torch.device, watch: Watch | None = None, cuda=torch.cuda):
        self._key, self._watch, self._cuda = key, watch, cuda
        self._stream = cuda.Stream(device)
        self._inside = False
        self._under_way: deque[CudaHandle] = deque()

    def inside(self) -> bool:
        return self._inside

    def idle(self) -> bool:
        return False  # an operation must follow those enqueued before it

    def lane(self) -> str:
        """Return the trace's lane of what runs on this stream."""
        return str(self._key)

    def run(self, operation: Callable, on_wait=None, what: str = "an operation"):
        return operation() if self._inside else self.submit(operation, on_wait, what).wait()

    def submit(self, operation: Callable, on_wait=None, what: str = "an operation") -> CudaHandle:
        self._let_go()
        caller = self._cuda.current_stream()
        self._stream.wait_stream(caller)
        begin = self._stream.record_event()
        self._inside = True
        try:
            with self._cuda.stream(self._stream):
                result = operation()
                handle = CudaHandle(
                    self._stream.record_event(), result, operation, caller, on_wait, self._cuda
                )
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

    inputs  what the operation was given, kept until it has ended, or the stream of its caller has waited for it
    """

    def __init__(self, event, result, inputs, caller, on_wait=None, cuda=torch.cuda):
        self.event, self.inputs = event, inputs
        self._result, self._caller, self._on_wait, self._cuda = result, caller, on_wait, cuda

    def finished(self) -> bool:
        return self.inputs is None or self.event.query()

    def wait(self):
        current = self._cuda.current_stream()
        start = current.record_event(self._timed()) if self._on_wait is not None else None
        current.wait_event(self.event)
        if start is not None:
            self._on_wait(start, current.record_event(self._timed()))
            self._on_wait = None
        for x in self._result if isinstance(self._result, tuple | list) else (self._result,):
            if isinstance(x, torch.Tensor):
                x.record_stream(current)  # allocated on the Comm's stream, used on this one
        if current == self._caller:
            self.inputs = None
        return self._result

    def _timed(self):
        return self._cuda.Event(enable_timing=True)
