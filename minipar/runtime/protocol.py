"""Messages between the caller of `run` and a rank: a Job or an Answer goes to a rank, a Status or a Failure back."""

from __future__ import annotations

import signal
from typing import NamedTuple

from minipar.comm.transport.diagnosis import MessageCounts
from minipar.comm.transport.messages import ChannelId
from minipar.comm.transport.watch import Stuck
from minipar.runtime.caller import CallerEnvironment
from minipar.runtime.stacks import Frame

# A rank answers this signal with its stack, as Java programs do. Windows, which `run` does not support, lacks it.
STACK_SIGNAL: int = getattr(signal, "SIGQUIT", 0)


class Job(NamedTuple):
    """A call of a function on a rank."""

    payload: bytes  # (fn, args)
    world_size: int
    run: int
    timeout_s: float
    environment: CallerEnvironment


class Answer(NamedTuple):
    """The caller's answer to what a rank has asked, which the thread that asked unpickles: what fails then, fails there."""

    payload: bytes


class Status(NamedTuple):
    """A rank's state: whether another rank blocks it, what it waits for, its message counts, and where its code is."""

    blocked: bool
    where: str
    counts: MessageCounts
    line: str = ""  # innermost line of the caller's own code
    stack: list[Frame] = []  # the main thread's stack, from the caller's function on
    # Whether the main thread is outside every function of a Comm, or another thread still works.
    running: bool = True
    operations: dict[ChannelId, int] = {}  # on GPUs, the operations put on each Comm's stream


class Failure(NamedTuple):
    """A rank's failure in a call."""

    traceback: str
    secondary: bool  # whether another rank's failure caused this one
    summary: str
    timed_out: bool = False  # whether a wait for other ranks has passed its deadline
    waited_for: int | None = None  # the rank whose message did not come in time
    stuck: Stuck | None = None  # the operation that did not end in time on a GPU
