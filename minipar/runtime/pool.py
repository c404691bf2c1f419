"""The caller's side of a local pool: its processes, and how a function is called on them."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from multiprocessing import Pipe
from signal import Signals
from typing import Any

from minipar.comm.transport.diagnosis import unmatched_messages
from minipar.runtime.call import Call, OnAsk, OnReport, loadable, results
from minipar.runtime.caller import CallerEnvironment
from minipar.runtime.forkserver import ForkServer
from minipar.runtime.protocol import Job
from minipar.runtime.rank_process import RankProcess
from minipar.runtime.serialization import dumps
from minipar.support.errors import RankError


class Pool:
    """Ranks 0 ... size-1, joined in one process group. `keeper` is the connection to the fork server: see forkserver.py."""

    def __init__(self, server: ForkServer, size: int, backend: str):
        self.size = size
        self._server = server
        self._owner = os.getpid()
        self._runs = 0
        self._folder: str | None = None  # where the ranks find each other
        self.keeper, keeper = Pipe()
        self.stacks, stacks = Pipe(duplex=False)
        self.ranks = [RankProcess(rank) for rank in range(size)]
        theirs = [keeper, stacks, *(end for rank in self.ranks for end in rank.theirs)]
        try:
            server.start(size, backend, [end.fileno() for end in theirs])
            for end in theirs:
                end.close()
            self._note_start(*self.keeper.recv())
            Call(self, self.ranks, "ready").wait()
        except BaseException:
            keeper.close()
            self.close()
            raise

    def _note_start(self, what: str, value: Any) -> None:
        if what == "failed":
            raise RuntimeError(f"the {self.size} processes of the pool cannot be started: {value}")
        self._folder, pids = value
        for rank, pid in zip(self.ranks, pids):
            rank.pid = pid

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    def run(
        self, payload: bytes, environment: CallerEnvironment, world_size: int, timeout_s: float,
        on_report: OnReport | None = None, on_ask: OnAsk | None = None,
    ) -> list[Any]:  # fmt: skip
        self._runs += 1
        job = dumps(Job(payload, world_size, self._runs, timeout_s, environment))
        ranks = self.ranks[:world_size]
        for rank in ranks:
            with suppress(OSError):  # the process has ended; the keeper reports that
                rank.pipe.send_bytes(job)
        answers = Call(self, ranks, "done", on_report, on_ask).wait()
        counts = {rank: own for rank, (_, own) in answers.items()}
        if found := unmatched_messages(counts):
            sentences = "\n".join(pair.sentence for pair in found)
            raise RankError(found[0].rank, sentences, returned=loadable(answers))
        by_rank = results(answers)
        return [by_rank[rank] for rank in range(world_size)]

    def hear(self) -> list[RankProcess]:
        """Read the fork server's reports; return the ranks that have ended: all of them if the server has ended."""
        before = {rank.rank for rank in self.ranks if rank.ended}
        try:
            while self.keeper.poll():
                self._note(*self.keeper.recv())
        except (EOFError, OSError):
            self._server.wait_until_gone()
            for rank in self.ranks:
                rank.ended = rank.ended or "ended with the fork server, which something has killed"
        return [rank for rank in self.ranks if rank.ended and rank.rank not in before]

    def _note(self, what: str, value: Any) -> None:
        if what == "stopped":
            rank, stopped = value
            self.ranks[rank].stopped = stopped
        elif what == "ended":
            rank, code = value
            how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            self.ranks[rank].ended = how

    def alive(self) -> bool:
        self.hear()
        return not any(rank.ended for rank in self.ranks)

    def close(self) -> None:
        """End every process; in a forked child, only close this process's ends."""
        if os.getpid() == self._owner:
            with suppress(EOFError, OSError):
                self.keeper.send_bytes(b"end")
                while True:
                    self.keeper.recv_bytes()  # the server closes its end once all ranks have ended
            if self._folder is not None:
                # The server has removed it, unless something has killed the server.
                shutil.rmtree(self._folder, ignore_errors=True)
        self.keeper.close()
        self.stacks.close()
        for rank in self.ranks:
            rank.close()


def _signal_name(number: int) -> str:
    """Return a signal's name; of the real-time signals, only the first and the last one have one."""
    return Signals(number).name if number in list(Signals) else f"signal {number}"
