"""One request to the ranks of a pool: wait for their answers, print what they print, explain a failure."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Protocol

from minipar.comm.transport.diagnosis import deadlock, last_waited_for
from minipar.comm.transport.messages import Message
from minipar.comm.transport.watch import Stuck, ranks_behind
from minipar.runtime import stacks
from minipar.runtime.output import Output
from minipar.runtime.protocol import STACK_SIGNAL, Answer, Failure, Status
from minipar.runtime.rank_process import RankProcess
from minipar.runtime.serialization import dumps, loads
from minipar.support.errors import RankError

OnReport = Callable[[int, Any], object]  # called with a rank and what it reports
OnAsk = Callable[[int, Any], object]  # called with a rank and what it asks; returns the answer
GRACE_S = 0.5  # after a failure, time for the other ranks to report its cause and what they wait for
PATIENCE_S = 0.5  # silence after which ranks are asked whether they are stuck
ANSWER_S = 5.0  # how long these ranks may take to answer; a machine may be overloaded


class Keeper(Protocol):
    """The part of a pool that a call needs: the connection to the fork server, the pipe for stacks, which ranks ended."""

    keeper: Connection
    stacks: Connection

    def hear(self) -> list[RankProcess]: ...


class Call:
    """One request to some ranks. `wait` returns when all have answered, and raises RankError when one has failed."""

    def __init__(
        self, pool: Keeper, ranks: Iterable[RankProcess], answer: str, on_report: OnReport | None = None,
        on_ask: OnAsk | None = None,
    ):  # fmt: skip
        self._pool = pool
        self._ranks = {rank.rank: rank for rank in ranks}
        self._answer = answer  # the kind of message with which a rank answers the request
        self._on_report, self._on_ask = on_report, on_ask
        self._answers: dict[int, Any] = {}
        self._failures: dict[int, Failure | str] = {}
        self._statuses: dict[int, Status] = {}
        self._closed: set[int] = set()  # ranks whose pipe has no more messages
        self._stuck: dict[int, str] | None = None

    def wait(self) -> dict[int, Any]:
        try:
            while len(self._answers) < len(self._ranks):
                if not self._listen(PATIENCE_S):
                    self._look_for_deadlock()
                if self._failures:
                    self._explain_failure()
            return self._answers
        finally:
            for rank in self._ranks.values():
                for output in rank.outputs:
                    output.finish()

    def _listen(self, timeout_s: float) -> bool:
        """Wait for messages of ranks, at most `timeout_s`, and process them; return False if there were none."""
        pipes = {rank.pipe: rank for r, rank in self._ranks.items() if r not in self._closed}
        outputs = [output for rank in self._ranks.values() for output in rank.outputs if output.open]
        sources: list[Any] = [self._pool.keeper, *pipes, *outputs]
        ready = connection.wait(sources, timeout_s)
        for source in ready:
            if source in pipes:
                self._take(pipes[source])
            elif isinstance(source, Output):
                source.forward()
        if self._pool.keeper in ready:
            self._note_ended()
        return bool(ready)

    def _take(self, rank: RankProcess) -> None:
        """Process one message of a rank, after printing what the rank printed before it."""
        for output in rank.outputs:
            if output.open:
                output.forward()
        try:
            message = rank.pipe.recv_bytes()
        except (EOFError, OSError):
            self._closed.add(rank.rank)  # the process has ended; the keeper reports that
            return
        what, value = loads(message)
        if what == "report" and self._on_report is not None:
            self._on_report(rank.rank, value)
        elif what == "ask":
            answer = None if self._on_ask is None else self._on_ask(rank.rank, value)
            message = dumps(Answer(dumps(answer)))
            with suppress(OSError):  # the process has ended; the keeper reports that
                rank.pipe.send_bytes(message)
        elif what == "status":
            self._statuses[rank.rank] = value
        elif what == "failed":
            self._failures[rank.rank] = value
        elif what == self._answer:
            self._answers[rank.rank] = value

    def _note_ended(self) -> None:
        for rank in self._pool.hear():
            if rank.rank in self._ranks:
                while rank.rank not in self._closed and rank.pipe.poll():
                    self._take(rank)  # its last message may say why
                self._closed.add(rank.rank)
                self._failures.setdefault(rank.rank, f"its process {rank.ended}")

    def _open(self) -> dict[int, RankProcess]:
        """Return the ranks whose answer is still to come."""
        done = {*self._answers, *self._failures}
        return {r: rank for r, rank in self._ranks.items() if r not in done}

    def _ask(self, timeout_s: float) -> None:
        """Ask the ranks that have not answered for their status; wait `timeout_s` at most, or until a first failure."""
        self._statuses.clear()
        for rank in self._open().values():
            with suppress(OSError):
                rank.pipe.send_bytes(dumps("status"))
        failed = bool(self._failures)
        deadline = time.monotonic() + timeout_s
        while bool(self._failures) == failed and (left := deadline - time.monotonic()) > 0:
            if all(r in self._statuses or rank.stopped for r, rank in self._open().items()):
                break
            self._listen(left)

    def _look_for_deadlock(self) -> None:
        """Raise RankError if the silent ranks are in a deadlock; two successive checks must find the same one."""
        self._ask(ANSWER_S)
        counts = {rank: status.counts for rank, status in self._statuses.items()}
        counts |= {rank: answer[1] for rank, answer in self._answers.items() if answer}
        if self._failures or len(counts) < len(self._ranks):
            return
        blocked = {rank for rank, status in self._statuses.items() if status.blocked}
        why = deadlock(counts, blocked, set(self._answers))
        if why and why == self._stuck:
            rank = min(why)
            at = {r: f" ({line})" for r in why if (line := self._statuses[r].line)}
            sentences = "\n  ".join(f"{reason}{at.get(r, '')}" for r, reason in why.items())
            raise RankError(rank, f"deadlock: {sentences}", self._others(rank), loadable(self._answers))
        self._stuck = why

    def _explain_failure(self) -> None:
        deadline = time.monotonic() + GRACE_S
        while (left := deadline - time.monotonic()) > 0 and all(map(_is_secondary, self._failures.values())):
            self._listen(left)
        self._ask(GRACE_S)
        while time.monotonic() < deadline and not all(s.blocked for s in self._statuses.values()):
            # Ask again: a running rank may soon block, and then report what it waits for, which explains more.
            self._listen(GRACE_S / 20)
            self._ask(GRACE_S)
        # Raise the first failure that is not a consequence of another rank's failure; without one, the first failure.
        primary = [r for r, failure in self._failures.items() if not _is_secondary(failure)]
        rank = (primary or list(self._failures))[0]
        failure = self._failures[rank]
        if not isinstance(failure, str) and failure.stuck is not None:
            self._name_who_is_behind(rank, failure.stuck)
        elif not isinstance(failure, str) and (failure.timed_out or not primary):
            # Without a timeout of its own, a rank can fail because another one ended its connection after one.
            self._name_who_is_late(rank, failure)
        traceback = failure if isinstance(failure, str) else failure.traceback
        raise RankError(rank, traceback, self._others(rank), loadable(self._answers))

    def _name_who_is_late(self, rank: int, failure: Failure) -> None:
        """Follow the waits of `rank`, which timed out, to their end; raise RankError for the rank there if it runs.

        If the waits of `rank` are unknown, take the lowest running rank.
        """
        self._ask(2 * GRACE_S)
        stack = {r: status.stack for r, status in self._statuses.items()}
        silent = {r: process for r, process in self._open().items() if r not in stack}
        stopped = {r for r, process in silent.items() if process.stopped}
        # `stopped` must be found before asking for stacks: asking wakes a stopped rank.
        stack |= {r: self._stack_of(process) for r, process in silent.items()}
        running = {r for r, status in self._statuses.items() if status.running}
        running |= stopped | {r for r in silent if not stacks.inside_comm(stack[r])}
        waits_for = self._waits_for()
        known = rank in waits_for  # a native collective does not tell which rank it waits for
        late = last_waited_for(rank, waits_for) if known else min(running, default=rank)
        if late in running:
            why = failure.summary.removeprefix("failed too: ")
            if late in silent:
                state = "stopped by a signal" if late in stopped else "running"
                where = f"{state} ({stacks.own_line(stack[late])})"
            else:
                where = self._statuses[late].where
            said = f"rank {late} is late: {why}\nit is {where}:\n{stacks.as_text(stack[late])}"
            raise RankError(late, said, self._others(late), loadable(self._answers))

    def _name_who_is_behind(self, rank: int, stuck: Stuck) -> None:
        """Raise RankError for the first rank that has not called the operation in which this rank's GPU waits."""
        counts = {r: status.operations for r, status in self._statuses.items()}
        counts |= dict.fromkeys(self._answers, {})
        behind = ranks_behind(stuck, counts)
        if not behind:
            return
        late = behind[0]
        also = f" (nor have ranks {behind[1:]})" if behind[1:] else ""
        where = self._statuses[late].where if late in self._statuses else "done: its function has returned"
        said = f"rank {late} is late: rank {rank} waits: {stuck}, which rank {late} has not called{also}; it is {where}"
        raise RankError(late, said, self._others(late), loadable(self._answers))

    def _waits_for(self) -> dict[int, int]:
        """Return, for each rank that waits or has waited for a message, the rank at the message's other end."""
        found = {}
        for r, status in self._statuses.items():
            message = next(iter(status.counts.waiting), None)
            if status.blocked and isinstance(message, Message):
                found[r] = message.peer
        for r, failure in self._failures.items():
            if isinstance(failure, Failure) and failure.waited_for is not None:
                found[r] = failure.waited_for
        return found

    def _stack_of(self, rank: RankProcess) -> list[stacks.Frame]:
        """Return the stack of a rank that does not answer, because it is stopped or in a loop outside Python."""
        stacks.signal_main_thread(rank.pid, STACK_SIGNAL)
        with suppress(OSError):
            os.kill(rank.pid, signal.SIGCONT)
        return stacks.read_dump(self._pool.stacks, ANSWER_S)

    def _others(self, rank: int) -> dict[int, str]:
        """Return what every rank but this one was doing when it was asked, or how it failed."""
        others = dict.fromkeys(self._answers, "has returned")
        others |= {r: status.where for r, status in self._statuses.items()}
        others |= {r: f if isinstance(f, str) else f.summary for r, f in self._failures.items()}
        return {r: what for r, what in others.items() if r != rank}


def results(answers: dict[int, Any]) -> dict[int, Any]:
    """Return the ranks' results from their answers to a run; answers to other requests carry none."""
    return {rank: loads(answer[0]) for rank, answer in answers.items() if answer}


def loadable(answers: dict[int, Any]) -> dict[int, Any]:
    """Return the results but those that cannot be unpickled here, which must not hide a rank's failure."""
    found: dict[int, Any] = {}
    for rank, answer in answers.items():
        with suppress(Exception):
            found |= results({rank: answer})
    return found


def _is_secondary(failure: Failure | str) -> bool:
    return not isinstance(failure, str) and failure.secondary
