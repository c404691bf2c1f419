"""A trace in a GPU's time: a span lasts from one event in a CUDA stream to another, not while the host enqueues it."""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch

from minipar.trace import Kind, Span, Trace


class CudaTrace(Trace):
    """A Trace whose spans begin and end with events in the current stream: recording one does not wait for the GPU.

    cuda  torch.cuda, or a stand-in for it

    Spans of the kind "disk" are the host's. Making the trace synchronises the GPU with the host, to have one moment on both
    clocks; so does reading `spans`.
    """

    def __init__(self, cuda=torch.cuda):
        self._cuda = cuda
        self._recorded: list[tuple[Kind, str, object, object, str]] = []
        cuda.synchronize()
        self._origin, self._origin_s = self.now(), time.perf_counter()

    @contextmanager
    def span(self, kind: Kind, name: str, lane: str = "main"):
        now = time.perf_counter if kind == "disk" else self.now
        start = now()
        try:
            yield
        finally:
            self.add(kind, name, start, now(), lane)

    def now(self):
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream())
        return event

    def add(self, kind: Kind, name: str, start, end, lane: str = "main") -> None:
        self._recorded.append((kind, name, start, end, lane))

    @property
    def spans(self) -> list[Span]:
        self._cuda.synchronize()
        return [
            Span(kind, name, self._seconds(start), self._seconds(end), lane)
            for kind, name, start, end, lane in self._recorded
        ]

    def _seconds(self, stamp) -> float:
        if isinstance(stamp, float):
            return stamp
        return self._origin_s + self._origin.elapsed_time(stamp) / 1000


def trace_on(device: torch.device) -> Trace:
    """Return a Trace for ranks whose tensors are on this device."""
    return CudaTrace() if device.type == "cuda" else Trace()
