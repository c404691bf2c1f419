"""A rank's side of a local pool: receive a function, run it, send back the result.

The main thread runs the functions. A second thread listens to the caller, so that a rank blocked in a receive can still
report what it waits for, and so that the rank ends as soon as the caller does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import queue
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from minipar.comm import Comm, PeerLost, native
from minipar.comm.messages import MessageCounts, PeerLate
from minipar.comm.transport import Transport
from minipar.comm.transports import choose_transport
from minipar.comm.watch import Stuck, Watch
from minipar.runtime.caller import CallerEnvironment, CallerModules
from minipar.runtime.devices import Machine, device_of, group_options
from minipar.runtime.environment import name_process
from minipar.runtime.protocol import STACK_SIGNAL, Failure, Job, Status
from minipar.runtime.serialization import dumps, loads
from minipar.runtime.stacks import inside_comm, main_stack, own_line
from minipar.runtime.threads import busy_threads
from minipar.runtime.torch_state import TorchState


def main(pipe: int, stacks: int, rank: int, size: int, backend: str, folder: str) -> None:
    """Run a rank's process: join the process group, then run one job after another.

    pipe    file descriptor of the connection to the caller
    stacks  file descriptor into which a signal writes the main thread's stack, whatever that thread is doing
    folder  where the ranks of the pool find each other
    """
    _wake_without_preempting()
    name_process(rank)
    _take_over_output()
    faulthandler.enable()  # a crash writes its stack to stderr
    faulthandler.register(STACK_SIGNAL, file=stacks)
    jobs: queue.SimpleQueue = queue.SimpleQueue()
    worker = Worker(Connection(pipe), rank, size)
    threading.Thread(target=worker.listen, args=(jobs,), daemon=True).start()
    try:
        worker.join(backend, folder)
    except Exception as error:
        worker.tell("failed", _failure(error))
        return
    worker.tell("ready", None)
    while True:
        worker.work(jobs.get())


class Worker:
    def __init__(self, pipe, rank: int, size: int):
        self.rank, self.size = rank, size
        self._pipe = pipe
        self._sending = threading.Lock()
        self._modules, self._torch = CallerModules(), TorchState()
        self._groups: dict = {}  # process groups, kept as long as the process runs
        self._transport: Transport | None = None

    def tell(self, what: str, value) -> None:
        with self._sending, contextlib.suppress(OSError):  # the caller has ended
            self._pipe.send_bytes(dumps((what, value)))

    def listen(self, jobs: queue.SimpleQueue) -> None:
        """Queue jobs, answer status requests, and end the process when the caller's end of the pipe closes.

        The fork server ends the process then, too; here it ends even where that server was killed.
        """
        try:
            while True:
                message = loads(self._pipe.recv_bytes())
                if isinstance(message, Job):
                    jobs.put(message)
                else:
                    self.tell("status", self.status())
        except (EOFError, OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)

    def join(self, backend: str, folder: str) -> None:
        """Join the process group through a file. gloo listens on loopback only, so no port opens to the network."""
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
        self._backend = backend
        self.device = device_of(backend, self.rank, Machine.here())
        store = dist.FileStore(os.path.join(folder, "store"), self.size)
        options = group_options(backend, self.device)
        dist.init_process_group(
            store=store, rank=self.rank, world_size=self.size, timeout=timedelta(minutes=10), **options
        )
        self.group = dist.group.WORLD

    def work(self, job: Job) -> None:
        try:
            answer = "done", (dumps(self._call(job)), self._transport.counts())
        except BaseException as error:
            answer = "failed", _failure(error)
        sys.stdout.flush()
        sys.stderr.flush()
        self.tell(*answer)

    def _call(self, job: Job):
        self._take_over(job.environment)
        self._torch.reset()
        self._transport = choose_transport(self._backend)(
            self.group, tuple(range(self.size)), self.rank, self.device, job.timeout_s, run=job.run,
            report=lambda value: self.tell("report", value), groups=self._groups,
        )  # fmt: skip
        if self.device.type == "cuda":
            self._watch_gpu(job.timeout_s)
        fn, args = loads(job.payload)
        world = Comm(self._transport, tuple(range(job.world_size)), "world")
        try:
            result = fn(world, *args)
            self._transport.drain()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # what it has only enqueued may still fail
            return result
        finally:
            self._modules.remember()
            if self._transport.watch is not None:
                self._transport.watch.stop()

    def _watch_gpu(self, timeout_s: float) -> None:
        """Have a thread tell the caller of an operation that does not end on the GPU: this rank may never come back."""
        native.set_timeout([self.group, *self._groups.values()], timeout_s, self.device)
        self._transport.watch = Watch(timeout_s, lambda stuck: self.tell("failed", _stuck(self.rank, stuck)))
        self._transport.watch.start(self.device)

    def _take_over(self, caller: CallerEnvironment) -> None:
        _take_over_output()
        self._modules.forget_stale(caller)
        sys.path[:], sys.argv[:] = caller.path, caller.argv
        os.environ.clear()
        os.environ.update(caller.environment, GLOO_SOCKET_IFNAME=_loopback())
        with contextlib.suppress(OSError):
            os.chdir(caller.directory)

    def status(self) -> Status:
        if self._transport is None:
            return Status(False, "starting", MessageCounts([], {}, {}))
        stack, waits = main_stack(), self._transport.waits
        line, busy = own_line(stack), busy_threads(waits)
        counts = self._transport.counts()
        messages = [what for what in counts.waiting if not isinstance(what, str)]
        waiting = [f"waiting to {m}" for m in messages] or [f"waiting for {what}" for what in counts.waiting]
        where = "; ".join(waiting) or "running"
        where = "; ".join([f"{where} ({line})" if line else where, *busy])
        blocked = threading.main_thread().ident in waits and not busy
        counts = counts._replace(waiting=messages)
        operations = {} if self._transport.watch is None else dict(self._transport.watch.counts)
        return Status(blocked, where, counts, line, stack, bool(busy) or not inside_comm(stack), operations)


def _take_over_output() -> None:
    """Make sys.stdout and sys.stderr line-buffered streams of file descriptors 1 and 2, which lead to the caller."""
    sys.stdout, sys.stderr = _text(1), _text(2)


def _text(fd: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.FileIO(fd, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True
    )


def _failure(error: BaseException) -> Failure:
    late = isinstance(error, PeerLate)
    said = str(error) if late else "".join(traceback.format_exception_only(error)).strip()
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
    timed_out = late or (native.__file__ in files and "imed out" in str(error))  # gloo's words, and torch's
    waited_for = error.peer if late else None
    secondary = isinstance(error, PeerLost)
    return Failure(_trimmed_traceback(error), secondary, f"failed too: {said}", timed_out, waited_for)


def _stuck(rank: int, stuck: Stuck) -> Failure:
    said = f"rank {rank}: {stuck}"
    return Failure(said, False, f"failed too: {said}", timed_out=True, stuck=stuck)


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
