"""Record a stream's operations, and the waits for them, in a trace."""

from __future__ import annotations

from functools import partial
from typing import Any

from minipar.comm.transport.stream import OnWait, Operation, Stream
from minipar.support.trace import Trace


def recorded(trace: Trace, name: str, stream: Stream, operation: Operation) -> tuple[Operation, OnWait]:
    """Return the operation, wrapped to record its span on the stream's lane, and a function that records a wait for it."""
    return partial(run_recorded, trace, name, stream, operation), partial(trace.add, "wait", name)


def run_recorded(trace: Trace, name: str, stream: Stream, operation: Operation) -> Any:
    with trace.span("communicate", name, stream.lane()):
        return operation()
