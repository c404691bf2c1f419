"""The one thread that may use a stream.

If two threads used a stream in an order that differs between ranks, each would receive the other's messages. Threads of
autograd and of other streams may use it, too, since they act for the thread that called them; but no thread may use it
while another thread is inside an operation.
"""

from __future__ import annotations

import threading

import torch


class StreamOwner:
    """The owner of a stream: the first thread that uses it."""

    def __init__(self, stream: str):
        self._stream = stream
        self.thread: threading.Thread | None = None

    def check(self, here: threading.Thread, inside: bool, acts_for_another: bool) -> None:
        """Raise RuntimeError unless the running thread `here` may use the stream.

        inside            another thread is inside an operation of the stream
        acts_for_another  `here` is the thread of a stream
        """
        if inside:
            raise RuntimeError(
                f"thread {here.name!r} uses {self._stream} while another thread is inside an operation of it: their "
                "messages could cross. Give each stream a subgroup with a name of its own"
            )
        if self.thread is here or acts_for_another or started_by_autograd(here):
            return
        if self.thread is not None:
            raise RuntimeError(
                f"two threads use {self._stream}, {self.thread.name!r} and {here.name!r}: their messages could cross. "
                "Let one thread use it; on gloo, each may also have a subgroup with a name of its own"
            )
        self.thread = here


def started_by_autograd(thread: threading.Thread) -> bool:
    """Return whether autograd started the running thread for a backward.

    A thread that the program itself has started does not act for another thread, even if it runs a backward.
    """
    return isinstance(thread, threading._DummyThread) and torch._C._current_graph_task_id() != -1
