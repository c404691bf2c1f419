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
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from minipar.comm import Comm
from minipar.comm.transport import native_calls, process_groups
from minipar.comm.transport.diagnosis import MessageCounts, message_counts
from minipar.comm.transport.errors import PeerLate, PeerLost, connection_broke
from minipar.comm.transport.messages import ChannelId
from minipar.comm.transport.process_groups import set_timeout
from minipar.comm.transport.transport import Transport
from minipar.comm.transport.transports import choose_transport
from minipar.comm.transport.watch import Stuck, Watch
from minipar.runtime.caller import CallerEnvironment, CallerModules
from minipar.runtime.devices import Machine, device_of, group_options
from minipar.runtime.protocol import STACK_SIGNAL, Answer, Failure, Job, Status
from minipar.runtime.serialization import dumps, loads
from minipar.runtime.stacks import inside_comm, main_stack, own_line, write_on_signal
from minipar.runtime.threads import busy_threads
from minipar.runtime.torch_state import TorchState
from minipar.support.environment import name_process

MAX_CHARACTERS = 1 << 16  # maximum length of a traceback that the caller gets; longer ones are shortened


@contextlib.contextmanager
def _main_script_of(fn: Any) -> Iterator[None]:
    """Replace `__main__` by a module with the names that `fn` uses, if fn comes from the caller's script or notebook.

    torch.compile looks up the globals of the functions that it traces in the module named by them.
    """
    while isinstance(fn, partial):
        fn = fn.func
    names, mine = getattr(fn, "__globals__", {}), sys.modules["__main__"]
    if names.get("__name__") == "__main__":
        sys.modules["__main__"] = ModuleType("__main__")
        vars(sys.modules["__main__"]).update(names)
    try:
        yield
    finally:
        sys.modules["__main__"] = mine


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
    write_on_signal(STACK_SIGNAL, stacks)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    worker = Worker(Connection(pipe), rank, size)
    main_stack()  # opens the file for stacks, if it needs one
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
    def __init__(self, pipe: Connection, rank: int, size: int):
        self.rank = rank
        self.size = size
        self._pipe = pipe
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._modules = CallerModules()
        self._torch = TorchState()
        # The process groups, which last as long as the process.
        self._groups: dict[ChannelId, dist.ProcessGroup] = {}
        self._transport: Transport | None = None  # the transport of the call under way, or of the last call

    def tell(self, what: str, value: object) -> None:
        message = dumps((what, value))  # here, so that what cannot travel raises
        with self._sending, contextlib.suppress(OSError):  # the caller has ended
            self._pipe.send_bytes(message)

    def ask(self, value: object) -> Any:
        """Return the caller's answer to a value; the caller's other messages are read meanwhile.

        Answers do not say to which question: one thread asks at a time.
        """
        with self._asking:
            self.tell("ask", value)
            answer = self._answers.get()
        return loads(answer)

    def listen(self, jobs: queue.SimpleQueue[Job]) -> None:
        """Queue jobs, answer status requests, and end the process when the caller's end of the pipe closes.

        The fork server would end the process, too; but this works even if the server was killed.
        """
        try:
            while True:
                message = loads(self._pipe.recv_bytes())
                if isinstance(message, Job):
                    jobs.put(message)
                elif isinstance(message, Answer):
                    self._answers.put(message.payload)
                else:
                    self.tell("status", self.status())
        except (EOFError, OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)

    def join(self, backend: str, folder: str) -> None:
        """Join the process group through a file. gloo listens on loopback only, so no port opens to the network."""
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
        self._backend = backend
        self.device = device_of(backend, self.rank, Machine.here())
        store = FileStore(os.path.join(folder, "store"), self.size)
        options = group_options(backend, self.device)
        dist.init_process_group(
            store=store, rank=self.rank, world_size=self.size, timeout=timedelta(minutes=10), **options
        )
        self.group: Any = dist.group.WORLD

    def work(self, job: Job) -> None:
        answer: tuple[str, object]
        try:
            result = dumps(self._call(job))
            answer = "done", (result, self._counts())
        except BaseException as error:
            answer = "failed", _failure(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
        self.tell(*answer)

    def _call(self, job: Job) -> Any:
        self._take_over(job.environment)
        self._torch.reset()
        transport = choose_transport(self._backend)(
            self.group, tuple(range(self.size)), self.rank, self.device, job.timeout_s, run=job.run,
            report=lambda value: self.tell("report", value), ask=self.ask, groups=self._groups,
        )  # fmt: skip
        if (
            self._transport is not None
        ):  # until now, so that ranks of its call could wait for this one, and be told so
            self._transport.close()
        self._transport = transport
        if self.device.type == "cuda":
            transport.watch = self._watch_gpu(job.timeout_s)
        fn, args = loads(job.payload)
        world = Comm(transport, tuple(range(job.world_size)), "world")
        try:
            with _main_script_of(fn):
                result = fn(world, *args)
            transport.drain()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # work that is only enqueued may still fail
            return result
        finally:
            self._modules.remember()
            if transport.watch is not None:
                transport.watch.stop()

    def _watch_gpu(self, timeout_s: float) -> Watch:
        """Start a thread that tells the caller if an operation on the GPU does not end: this rank may hang forever."""
        set_timeout([self.group, *self._groups.values()], timeout_s, self.device)
        watch = Watch(timeout_s, lambda stuck: self.tell("failed", _stuck(self.rank, stuck)))
        watch.start(self.device)
        return watch

    def _take_over(self, caller: CallerEnvironment) -> None:
        _take_over_output()
        self._modules.forget_stale(caller)
        sys.path[:], sys.argv[:] = caller.path, caller.argv
        os.environ.clear()
        os.environ.update(caller.environment, GLOO_SOCKET_IFNAME=_loopback())
        with contextlib.suppress(OSError):
            os.chdir(caller.directory)

    def _counts(self) -> MessageCounts:
        if self._transport is None:
            return MessageCounts([], {}, {})
        return message_counts(self._transport.waits, self._transport.channels.values())

    def status(self) -> Status:
        counts = self._counts()
        if self._transport is None:
            return Status(False, "starting", counts)
        waits, watch = self._transport.waits, self._transport.watch
        stack = main_stack()
        line = own_line(stack)
        busy = busy_threads(waits)
        messages = [what for what in counts.waiting if not isinstance(what, str)]
        waiting = [f"waiting to {m}" for m in messages] or [f"waiting for {what}" for what in counts.waiting]
        where = "; ".join(waiting) or "running"
        where = "; ".join([f"{where} ({line})" if line else where, *busy])
        blocked = threading.main_thread().ident in waits and not busy
        operations = {} if watch is None else dict(watch.counts)
        running = bool(busy) or not inside_comm(stack)
        return Status(blocked, where, counts._replace(waiting=messages), line, stack, running, operations)


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
    of_torch = not files.isdisjoint((native_calls.__file__, process_groups.__file__))
    timed_out = late or (of_torch and _says("timed out|timeout", error))
    waited_for = error.peer if isinstance(error, PeerLate) else None
    # gloo closes a rank's connections when one of the rank's operations has passed its deadline.
    lost = of_torch and connection_broke(error)
    secondary = lost or isinstance(error, PeerLost)
    summary = f"failed too: {shortened(said)}"
    return Failure(shortened(_trimmed_traceback(error)), secondary, summary, timed_out, waited_for)


def _says(pattern: str, error: BaseException) -> bool:
    return re.search(pattern, str(error), re.IGNORECASE) is not None


def shortened(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return a text of at most about `most` characters: its beginning and its end, and how much is left out between."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters are left out ...\n{text[-half:]}"


def _stuck(rank: int, stuck: Stuck) -> Failure:
    said = f"rank {rank}: {stuck}"
    return Failure(said, False, f"failed too: {said}", timed_out=True, stuck=stuck)


def _trimmed_traceback(error: BaseException) -> str:
    """Return the traceback from the caller's function on, without this file's frames."""
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _wake_without_preempting() -> None:
    """Use batch scheduling for this process and the threads that it starts.

    gloo's thread polls without sleeping while another thread is inside a send on the same pair. If the rank that the
    message wakes preempts the sending thread, the poll lasts a whole time slice: a step of 50 microseconds takes 3 ms.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"
