"""The stream of a Comm on CUDA: operations are enqueued on a CUDA stream from the calling thread, in call order."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaStream:
    """A stream with the interface of `ThreadStream`. No method blocks the host."""

    def __init__(self, name: str, device: torch.device):
        self.name = name
        self._stream = torch.cuda.Stream(device)
        self._inside = False

    def inside(self) -> bool:
        return self._inside

    def idle(self) -> bool:
        return False  # an operation must follow those enqueued before it

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
    """Handle of an operation: `wait()` returns its result and makes the current stream, not the host, wait for it."""

    def __init__(self, event, result):
        self._event = event
        self._result = result

    def wait(self):
        current = torch.cuda.current_stream()
        current.wait_event(self._event)
        for x in self._result if isinstance(self._result, tuple | list) else (self._result,):
            if isinstance(x, torch.Tensor):
                x.record_stream(current)  # allocated on the Comm's stream, used on this one
        return self._result
