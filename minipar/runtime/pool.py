"""The caller's side of a local pool: start the processes, call a function on them, explain a failure."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
import types
from contextlib import contextmanager, suppress
from multiprocessing import connection

from minipar.comm.diagnosis import deadlock, unmatched_messages
from minipar.errors import RankError
from minipar.runtime import worker
from minipar.runtime.serialization import CallerEnvironment, dumps, loads

GRACE_S = 0.5  # after a failure, time for the other ranks to report its cause and what they wait for
PATIENCE_S = 0.5  # silence after which ranks are asked whether they are stuck
ANSWER_S = 5.0  # how long they may take to answer, on an overloaded machine


class Pool:
    """Processes 0 ... size-1, joined in one process group."""

    def __init__(self, size: int, backend: str):
        self.size = size
        self.busy = False
        self._runs = 0
        self._folder = tempfile.mkdtemp(prefix="minipar-")
        self._pipes, self._processes = [], []
        method = "spawn" if sys.platform in ("darwin", "win32") else "forkserver"
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            # The first optimizer of a process imports torch._dynamo; here one import serves all processes.
            context.set_forkserver_preload(["torch", "torch._dynamo", "numpy", "minipar.runtime.worker"])
        try:
            with _no_main_module():
                for rank in range(size):
                    here, there = context.Pipe()
                    process = context.Process(
                        target=worker.main, args=(there, rank, size, backend, self._folder), daemon=True
                    )
                    process.start()
                    there.close()
                    self._pipes.append(here)
                    self._processes.append(process)
            _Call(self, range(size), "ready").wait()
        except BaseException:
            self.close()
            raise

    def run(self, payload: bytes, world_size: int, timeout_s: float, on_report) -> list:
        self._runs += 1
        self.busy = True
        job = dumps(worker.Job(payload, world_size, self._runs, timeout_s, CallerEnvironment.here()))
        for rank in range(world_size):
            with suppress(OSError):  # the process has ended; its sentinel reports that
                self._pipes[rank].send_bytes(job)
        answers = _Call(self, range(world_size), "done", on_report).wait()
        counts = {rank: own for rank, (_, own) in answers.items()}
        if found := unmatched_messages(counts):
            sentences = "\n".join(pair.sentence for pair in found)
            raise RankError(found[0].rank, sentences, returned=_results(answers))
        by_rank = _results(answers)
        results = [by_rank[rank] for rank in range(world_size)]
        self.busy = False  # not after a failure: such a pool is not used again
        return results

    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """Kill every process, close its pipe and delete the pool's folder."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Call:
    """One request to some ranks. `wait` returns when all have answered, and raises RankError when one has failed."""

    def __init__(self, pool: Pool, ranks, answer: str, on_report=None):
        self._pipes = {pool._pipes[rank]: rank for rank in ranks}
        self._sentinels = {pool._processes[rank].sentinel: rank for rank in ranks}
        self._size = len(ranks)
        self._processes = pool._processes
        self._answer = answer  # the kind of message that ends a rank's part
        self._on_report = on_report
        self._answers: dict[int, object] = {}
        self._failures: dict[int, object] = {}
        self._statuses: dict[int, object] = {}
        self._stuck: dict[int, str] | None = None

    def wait(self) -> dict[int, object]:
        while len(self._answers) < self._size:
            if not self._listen(PATIENCE_S):
                self._look_for_deadlock()
            if self._failures:
                self._explain_failure()
        return self._answers

    def _listen(self, timeout_s: float) -> bool:
        """Wait for messages of ranks, at most `timeout_s`, and process them; return False if there were none."""
        ready = connection.wait([*self._pipes, *self._sentinels], timeout_s)
        for source in ready:
            if source in self._pipes:
                self._take(self._pipes[source], source)
            else:
                self._died(self._sentinels.pop(source))
        return bool(ready)

    def _take(self, rank: int, pipe) -> None:
        try:
            what, value = loads(pipe.recv_bytes())
        except (EOFError, OSError):
            del self._pipes[pipe]  # the process has ended; its sentinel reports that
            return
        if what == "print":
            name, lines = value
            print(*(f"[rank {rank}] {line}" for line in lines), sep="\n", file=getattr(sys, name), flush=True)
        elif what == "report" and self._on_report is not None:
            self._on_report(rank, value)
        elif what == "status":
            self._statuses[rank] = value
        elif what == "failed":
            self._failures[rank] = value
        elif what == self._answer:
            self._answers[rank] = value

    def _died(self, rank: int) -> None:
        self._processes[rank].join()
        code = self._processes[rank].exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._failures.setdefault(rank, f"its process {how}")

    def _ask(self, timeout_s: float) -> None:
        """Ask the ranks that have not answered for their status; wait at most `timeout_s` for it."""
        self._statuses.clear()
        asked = {
            pipe: r for pipe, r in self._pipes.items() if r not in self._answers and r not in self._failures
        }
        for pipe in asked:
            try:
                pipe.send_bytes(dumps("status"))
            except OSError:
                continue
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not set(asked.values()) - {*self._statuses, *self._answers, *self._failures}:
                break
            self._listen(left)

    def _look_for_deadlock(self) -> None:
        """Raise RankError if the silent ranks are in a deadlock: if two checks in a row find the same one."""
        self._ask(ANSWER_S)
        counts = {rank: status.counts for rank, status in self._statuses.items()}
        counts |= {rank: answer[1] for rank, answer in self._answers.items() if answer}
        if self._failures or len(counts) < len(self._pipes):
            return
        blocked = {rank for rank, status in self._statuses.items() if status.blocked}
        why = deadlock(counts, blocked, set(self._answers))
        if why and why == self._stuck:
            rank = min(why)
            at = {r: f" ({line})" for r in why if (line := self._statuses[r].line)}
            sentences = "\n  ".join(f"{reason}{at.get(r, '')}" for r, reason in why.items())
            raise RankError(rank, f"deadlock: {sentences}", self._others(rank), _results(self._answers))
        self._stuck = why

    def _explain_failure(self) -> None:
        deadline = time.monotonic() + GRACE_S
        while (left := deadline - time.monotonic()) > 0 and self._only_secondary():
            self._listen(left)
        self._ask(GRACE_S)
        while time.monotonic() < deadline and not all(s.blocked for s in self._statuses.values()):
            self._listen(GRACE_S / 20)  # a running rank may soon block: what it then waits for explains more
            self._ask(GRACE_S)
        rank = min(
            self._failures, key=lambda r: (_is_secondary(self._failures[r]), list(self._failures).index(r))
        )
        failure = self._failures[rank]
        traceback = failure if isinstance(failure, str) else failure.traceback
        raise RankError(rank, traceback, self._others(rank), _results(self._answers))

    def _others(self, rank: int) -> dict[int, str]:
        """Return what every rank but this one was doing when it was asked, or how it failed."""
        others = dict.fromkeys(self._answers, "has returned")
        others |= {r: status.where for r, status in self._statuses.items()}
        others |= {r: f if isinstance(f, str) else f.summary for r, f in self._failures.items()}
        return {r: what for r, what in others.items() if r != rank}

    def _only_secondary(self) -> bool:
        return all(_is_secondary(failure) for failure in self._failures.values())


def _results(answers: dict[int, object]) -> dict[int, object]:
    """Return the ranks' results from their answers to a run; answers to other requests carry none."""
    return {rank: loads(answer[0]) for rank, answer in answers.items() if answer}


def _is_secondary(failure) -> bool:
    return not isinstance(failure, str) and failure.secondary


@contextmanager
def _no_main_module():
    """Hide the caller's script from new processes, so that it needs no `if __name__ == "__main__"`."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
