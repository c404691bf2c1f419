"""A rank's side of a local pool: receive a function, run it, send back the result.

The main thread runs the functions. A second thread listens to the caller, so that a rank blocked in a receive can still
report what it waits for, and so that the rank ends as soon as the caller does.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import random
import shutil
import signal
import sys
import threading
import traceback
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from minipar.comm import Comm, PeerLost
from minipar.comm.grouped import Grouped
from minipar.comm.messages import MessageCounts
from minipar.comm.transport import Tagged, Transport
from minipar.runtime.serialization import CallerEnvironment, CallerModules, dumps, is_own, loads


class Job(NamedTuple):
    payload: bytes  # (fn, args)
    world_size: int
    run: int
    timeout_s: float
    environment: CallerEnvironment


class Status(NamedTuple):
    """The state of a rank: whether another rank blocks it, what it waits for, and its message counts."""

    blocked: bool
    where: str
    counts: MessageCounts
    line: str = ""  # innermost line of the caller's own code


class Failure(NamedTuple):
    traceback: str
    secondary: bool  # a consequence of another rank's failure
    summary: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        last = "".join(traceback.format_exception_only(error)).strip()
        return cls(_trimmed_traceback(error), isinstance(error, PeerLost), f"failed too: {last}")


def main(pipe, rank: int, size: int, backend: str, folder: str) -> None:
    """Run a rank's process: join the process group, then run one job after another."""
    # Ctrl-C reaches every process; only the caller handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _wake_without_preempting()
    jobs: queue.SimpleQueue = queue.SimpleQueue()
    worker = Worker(pipe, rank, size)
    threading.Thread(target=worker.listen, args=(jobs, folder), daemon=True).start()
    sys.stdout, sys.stderr = _Lines(worker, "stdout"), _Lines(worker, "stderr")
    try:
        worker.join(backend, folder)
    except Exception as error:
        worker.tell("failed", Failure.of(error))
        return
    worker.tell("ready", None)
    while True:
        worker.work(jobs.get())


class Worker:
    def __init__(self, pipe, rank: int, size: int):
        self.rank, self.size = rank, size
        self._pipe = pipe
        self._sending = threading.Lock()
        self._modules = CallerModules()
        self._groups: dict = {}  # process groups, kept as long as the process runs
        self._transport: Transport | None = None

    def tell(self, what: str, value) -> None:
        with self._sending, contextlib.suppress(OSError):  # the caller has ended
            self._pipe.send_bytes(dumps((what, value)))

    def listen(self, jobs: queue.SimpleQueue, folder: str) -> None:
        """Queue jobs, answer status requests, and end the process when the caller's end of the pipe closes."""
        try:
            while True:
                message = loads(self._pipe.recv_bytes())
                if isinstance(message, Job):
                    jobs.put(message)
                else:
                    self.tell("status", self.status())
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)  # a caller that was killed has not deleted it
            os._exit(0)

    def join(self, backend: str, folder: str) -> None:
        """Join the process group through a file. gloo listens on loopback only, so no port opens to the network."""
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
        self._make_transport, self.device = Tagged, torch.device("cpu")
        if backend == "nccl":
            self._make_transport = Grouped
            self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        store = dist.FileStore(os.path.join(folder, "store"), self.size)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=timedelta(minutes=10)
        )
        self.group = dist.group.WORLD

    def work(self, job: Job) -> None:
        try:
            answer = "done", (dumps(self._call(job)), self._transport.counts())
        except BaseException as error:
            answer = "failed", Failure.of(error)
        sys.stdout.flush()
        sys.stderr.flush()
        self.tell(*answer)

    def _call(self, job: Job):
        self._take_over(job.environment)
        _reset_torch()
        self._transport = self._make_transport(
            self.group, tuple(range(self.size)), self.rank, self.device, job.timeout_s, run=job.run,
            report=lambda value: self.tell("report", value), groups=self._groups,
        )  # fmt: skip
        fn, args = loads(job.payload)
        world = Comm(self._transport, tuple(range(job.world_size)), "world")
        try:
            return fn(world, *args)
        finally:
            self._modules.remember()

    def _take_over(self, caller: CallerEnvironment) -> None:
        self._modules.forget_stale(caller)
        sys.path[:], sys.argv[:] = caller.path, caller.argv
        os.environ.clear()
        os.environ.update(caller.environment, GLOO_SOCKET_IFNAME=_loopback())
        with contextlib.suppress(OSError):
            os.chdir(caller.directory)

    def status(self) -> Status:
        main = threading.main_thread().ident
        stack = traceback.walk_stack(sys._current_frames().get(main))
        own = [
            f"{os.path.basename(f.f_code.co_filename)}:{line} in {f.f_code.co_name}"
            for f, line in stack
            if is_own(f.f_code.co_filename)
        ]
        if self._transport is None:
            return Status(False, "starting", MessageCounts([], {}, {}))
        counts = self._transport.counts()
        messages = [what for what in counts.waiting if not isinstance(what, str)] or counts.waiting
        waiting = "; ".join(
            f"waiting to {m}" if not isinstance(m, str) else f"waiting for {m}" for m in messages
        )
        where = waiting or "running"
        counts = counts._replace(waiting=[what for what in counts.waiting if not isinstance(what, str)])
        blocked = main in self._transport.waits
        return Status(blocked, f"{where} ({own[0]})" if own else where, counts, own[0] if own else "")


class _Lines(io.TextIOBase):
    """An output stream that sends its lines to the caller, which prints them with the rank."""

    def __init__(self, worker: Worker, name: str):
        self._worker, self._name, self._line = worker, name, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._worker.tell("print", (self._name, lines))
        return len(text)

    def flush(self) -> None:
        if self._line:
            self.write("\n")


def _reset_torch() -> None:
    """Reset torch's global state, so that no earlier function changes what the next one computes."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # the setter imports a compiler, which takes a second
        torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)  # ranks share the cores
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    for name, hooks in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            hooks.clear()


def _trimmed_traceback(error: BaseException) -> str:
    """The traceback from the caller's function on, without this file's frames."""
    frames = error.__traceback__
    while frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _wake_without_preempting() -> None:
    """Use batch scheduling for this process; the threads it starts inherit it.

    gloo's thread polls without sleeping while another thread is inside a send on the same pair. If the rank that the
    message wakes preempts the sending thread, the poll lasts a whole time slice, and a step of 50 microseconds 3 ms.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"
