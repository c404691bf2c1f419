"""Messages between the caller of `run` and a rank: a Job goes to a rank, a Status or a Failure comes back."""

from __future__ import annotations

import signal
from typing import NamedTuple

from minipar.comm.messages import ChannelId, MessageCounts
from minipar.comm.watch import Stuck
from minipar.runtime.caller import CallerEnvironment
from minipar.runtime.stacks import Frame

STACK_SIGNAL = getattr(signal, "SIGQUIT", None)  # a rank answers it with its stack, as Java's programs do


class Job(NamedTuple):
    payload: bytes  # (fn, args)
    world_size: int
    run: int
    timeout_s: float
    environment: CallerEnvironment


class Status(NamedTuple):
    """The state of a rank: whether another rank blocks it, what it waits for, its message counts, where its code is."""

    blocked: bool
    where: str
    counts: MessageCounts
    line: str = ""  # innermost line of the caller's own code
    stack: list[Frame] = []  # of the main thread, from the caller's function on
    running: bool = True  # outside every function of a Comm, in the main thread or another one
    operations: dict[ChannelId, int] = {}  # on GPUs, the operations put on each Comm's stream


class Failure(NamedTuple):
    traceback: str
    secondary: bool  # a consequence of another rank's failure
    summary: str
    timed_out: bool = False  # a wait for others has passed its deadline
    waited_for: int | None = None  # the rank whose message did not come in time
    stuck: Stuck | None = None  # the operation that did not end in time on a GPU
