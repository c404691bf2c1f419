"""The fork server: a process that starts the ranks, and ends every one of them when the caller ends.

It imports torch once and then forks a rank in milliseconds. Where forking is unsafe (macOS), it starts a new interpreter
for each rank. A pool is one connection between the caller and the server, its keeper: on it the server says what becomes
of the ranks, and anything it receives, the end too, is the order to end them.

What multiprocessing's fork server does not give: a rank ends with its caller, however that one ended and whatever the rank
is doing (a loop in C, stopped by a signal), and so do its children, such as a DataLoader's workers, as each rank leads a
process group; nothing depends on `__main__`, on the calling thread, or on the length of TMPDIR.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

LOOK_S = 0.5  # how often the server looks whether its caller lives, where nothing tells it
# The first optimizer of a process imports torch._dynamo; here one import serves all ranks.
_PRELOADED = ("torch", "torch._dynamo", "numpy", "minipar.runtime.worker")
_MAX_FDS = 250  # in one message, by Linux; a pool of 64 ranks takes 194


class ForkServer:
    """The caller's side: the server's process."""

    def __init__(self, method: str = "exec" if sys.platform == "darwin" else "fork"):
        self._caller = os.getpid()
        self._control, theirs = socket.socketpair()
        with theirs:
            # In a session of its own: what a terminal does to the caller (Ctrl-C, Ctrl-Z) does not reach the ranks.
            self._process = subprocess.Popen(
                _interpreter(f"{__name__}.serve", theirs.fileno(), self._caller, method),
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def start(self, size: int, backend: str, ends: Sequence[int]) -> None:
        """Start ranks 0 ... size-1 of a pool.

        The answer comes from the keeper: ("started", (folder, process ids)) or ("failed", why).

        ends  the file descriptors to pass on: the keeper, the pipe for stacks, and for each rank its message pipe, stdout
              and stderr
        """
        if not self._control.recv(1, socket.MSG_PEEK):  # the server writes it when it has imported everything
            raise RuntimeError(f"the fork server has ended with exit code {self._process.wait()}")
        socket.send_fds(self._control, [json.dumps([size, backend, tempfile.gettempdir()]).encode()], ends)

    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_gone(self) -> None:
        """Wait, a second at most, until a server whose connections have ended is not alive: they end a little earlier."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)

    def close(self) -> None:
        """End the server, and with it every rank; in a forked child, only let go of it."""
        if os.getpid() == self._caller:
            with contextlib.suppress(OSError):  # it has ended
                self._control.shutdown(socket.SHUT_RDWR)  # a forked child may hold this end, too
            self._process.wait()
        else:
            self._process.returncode = 0  # it is not this process's child
        self._control.close()


def _interpreter(function: str, *args) -> list[str]:
    """Return the command of a new interpreter that imports what this one can, and calls a function of a module."""
    module, _, name = function.rpartition(".")
    program = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {name}; {name}{args!r}"
    return [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", program]


def serve(control_fd: int, caller: int, method: str) -> None:
    """Run the server's process."""
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    with _ending_with(caller, control):
        for name in _PRELOADED if method == "fork" else ():
            importlib.import_module(name)
    server = _Server(control, caller, method)
    try:
        with contextlib.suppress(OSError):  # the caller has ended
            control.send(b"!")
            server.run()
    except BaseException:
        traceback.print_exc()
    finally:
        server.end_all()
        os._exit(0)


@contextlib.contextmanager
def _ending_with(caller: int, control: socket.socket):
    """End this process as soon as the caller ends or lets go of it, in the middle of an import too."""

    def look(*_):
        if os.getppid() != caller or wait([control], 0):  # readable: at its end, as nothing is sent yet
            os._exit(0)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


class _Pool(NamedTuple):
    folder: str  # where the ranks find each other
    ranks: dict[int, int]  # process id -> rank, while the process lives


class _Server:
    def __init__(self, control: socket.socket, caller: int, method: str):
        self._control, self._caller = control, caller
        self._begin = self._fork if method == "fork" else self._exec
        self._pools: dict[Connection, _Pool] = {}
        self._interpreters: list = []  # a Popen that is garbage-collected waits for its process
        self._woken, self._wake = socket.socketpair()  # readable when a rank has ended or was stopped
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        while os.getppid() == self._caller:
            ready = wait([self._control, self._woken, *self._pools], LOOK_S)
            if self._woken in ready:
                self._woken.recv(1 << 12)
            self._report()
            for keeper in set(ready) & set(self._pools):
                self._end(keeper)
            if self._control in ready and not self._start():
                return

    def end_all(self) -> None:
        for keeper in list(self._pools):
            self._end(keeper)

    def _start(self) -> bool:
        """Start a pool's ranks; return False where there is no request, as the caller has let go of the server."""
        request, fds, *_ = socket.recv_fds(self._control, 1 << 12, _MAX_FDS)
        if not request:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)
        size, backend, temporary = json.loads(request)
        keeper = Connection(fds.pop(0))
        try:
            folder = tempfile.mkdtemp(prefix="minipar-", dir=temporary)
            pool = self._pools[keeper] = _Pool(folder, {})
            for rank in range(size):
                pool.ranks[self._begin(fds, rank, size, backend, folder)] = rank
            answer = "started", (folder, list(pool.ranks))
        except OSError as error:
            answer = "failed", str(error)
        for fd in fds:
            os.close(fd)
        self._tell(keeper, *answer)
        return True

    def _fork(self, fds: list[int], rank: int, size: int, backend: str, folder: str) -> int:
        from minipar.runtime import worker

        stacks, pipe, out, err = fds[0], *fds[1 + 3 * rank : 4 + 3 * rank]
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):  # both do it, so that it is done when either goes on
                os.setpgid(pid, pid)
            return pid
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(out, 1)
            os.dup2(err, 2)
            for end in (self._control, self._woken, self._wake, *self._pools):
                end.close()
            for fd in set(fds) - {stacks, pipe}:
                os.close(fd)
            worker.main(pipe, stacks, rank, size, backend, folder)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _exec(self, fds: list[int], rank: int, size: int, backend: str, folder: str) -> int:
        stacks, pipe, out, err = fds[0], *fds[1 + 3 * rank : 4 + 3 * rank]
        process = subprocess.Popen(
            _interpreter("minipar.runtime.worker.main", pipe, stacks, rank, size, backend, folder),
            pass_fds=[pipe, stacks], stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0,
        )  # fmt: skip
        self._interpreters.append(process)
        return process.pid

    def _report(self) -> None:
        """Tell the callers which ranks have ended or were stopped. With a rank its children end."""
        while any(pool.ranks for pool in self._pools.values()):
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not pid:
                return
            for keeper, pool in self._pools.items():
                if pid not in pool.ranks:
                    continue
                if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                    self._tell(keeper, "stopped", (pool.ranks[pid], os.WIFSTOPPED(status)))
                else:
                    _kill_group(pid)
                    self._tell(keeper, "ended", (pool.ranks.pop(pid), os.waitstatus_to_exitcode(status)))

    def _end(self, keeper: Connection) -> None:
        """Kill a pool's ranks, delete its folder, and close the keeper, from which the caller knows that it is done."""
        pool = self._pools.pop(keeper)
        for pid in pool.ranks:
            _kill_group(pid)
        for pid in pool.ranks:
            os.waitpid(pid, 0)
        shutil.rmtree(pool.folder, ignore_errors=True)
        keeper.close()

    def _tell(self, keeper: Connection, what: str, value) -> None:
        with contextlib.suppress(OSError):  # the caller has ended
            keeper.send((what, value))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
