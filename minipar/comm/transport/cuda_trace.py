"""A trace in GPU time: a span lasts from one event in a CUDA stream to another, not while the host enqueues work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from minipar.support.trace import Kind, Span, Trace


class CudaTrace(Trace):
    """A Trace whose spans begin and end with events in the current stream. Recording a span does not wait for the GPU.

    cuda  torch.cuda, or a stand-in for it

    Spans of the kind "disk" are in host time. Making the trace synchronises the GPU with the host, so that one moment is
    known on both clocks; reading `spans` synchronises, too.
    """

    def __init__(self, cuda: Any = torch.cuda):
        self._cuda = cuda
        self._recorded: list[tuple[Kind, str, Any, Any, str]] = []
        cuda.synchronize()
        self._origin = self.now()
        self._origin_s = time.perf_counter()

    @contextmanager
    def span(self, kind: Kind, name: str, lane: str = "main") -> Iterator[None]:
        now = time.perf_counter if kind == "disk" else self.now
        start = now()
        try:
            yield
        finally:
            self.add(kind, name, start, now(), lane)

    def now(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream())
        return event

    def add(self, kind: Kind, name: str, start: Any, end: Any, lane: str = "main") -> None:
        self._recorded.append((kind, name, start, end, lane))

    @property
    def spans(self) -> list[Span]:  # type: ignore[override]
        self._cuda.synchronize()
        return [
            Span(kind, name, self._seconds(start), self._seconds(end), lane)
            for kind, name, start, end, lane in self._recorded
        ]

    def _seconds(self, stamp: Any) -> float:
        if isinstance(stamp, float):
            return stamp
        return self._origin_s + float(self._origin.elapsed_time(stamp)) / 1000


def trace_on(device: torch.device) -> Trace:
    """Return a Trace for ranks whose tensors are on this device."""
    return CudaTrace() if device.type == "cuda" else Trace()
