"""The fork server: a process that starts the ranks, and ends every one of them when the caller ends.

It imports torch once and then forks a rank in milliseconds. Where forking is unsafe (macOS), it starts a new interpreter
for each rank. A pool has one connection between the caller and the server, its keeper. Through the keeper, the server
reports which ranks have ended or stopped. When anything arrives there, or when the keeper closes, the server ends the
ranks.

Unlike with multiprocessing's fork server, a rank ends with its caller, however the caller ended and whatever the rank is
doing: it may be in a loop in C, or stopped by a signal. Its children, such as a DataLoader's workers, end too, because each
rank leads a process group. On Linux even children in a session of their own end: they become the server's children when
their rank has ended, and the server ends them. On other systems, or if the server itself was killed, such children live on.
Nothing depends on `__main__`, on the calling thread, or on the length of TMPDIR.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
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
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

LOOK_S = 0.5  # seconds between checks whether the caller still lives, since the system may not report that it has ended
# The first optimizer of a process imports torch._dynamo; here one import serves all ranks.
_PRELOADED = ("torch", "torch._dynamo", "numpy", "minipar.runtime.worker")
# Packages that start no thread when they are imported. The server imports what the caller has imported of them, before it
# forks, so that not every rank has to.
_SHARED = ("minipar", "hypothesis", "pytest")
PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
_MAX_FDS = 250  # Linux's limit for one message; a pool of 64 ranks takes 194


class ForkServer:
    """The caller's side: the server's process."""

    def __init__(self, method: str = "exec" if sys.platform == "darwin" else "fork"):
        self._caller = os.getpid()
        self._control, theirs = socket.socketpair()
        with theirs:
            # The server has its own session, so that a terminal's Ctrl-C and Ctrl-Z reach the caller but not the ranks.
            self._process = subprocess.Popen(
                _interpreter(f"{__name__}.serve", theirs.fileno(), self._caller, method),
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def start(self, size: int, backend: str, ends: Sequence[int]) -> None:
        """Start ranks 0 ... size-1 of a pool.

        The keeper brings the answer: ("started", (folder, process ids)) or ("failed", why).

        ends  the file descriptors to pass on: the keeper, the pipe for stacks, and for each rank its message pipe, stdout
              and stderr
        """
        # The server writes this once it has imported everything.
        if not self._control.recv(1, socket.MSG_PEEK):
            raise RuntimeError(f"the fork server has ended with exit code {self._process.wait()}")
        request = json.dumps([size, backend, tempfile.gettempdir(), _imported()]).encode()
        socket.send_fds(self._control, [len(request).to_bytes(4, "big")], ends)
        self._control.sendall(request)

    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_gone(self) -> None:
        """Wait, at most a second, for the server's process to end; its connections close slightly earlier."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)

    def close(self) -> None:
        """End the server, and with it every rank; in a forked child, only close the connection."""
        if os.getpid() == self._caller:
            with contextlib.suppress(OSError):  # it has ended
                self._control.shutdown(socket.SHUT_RDWR)  # also if a forked child holds this end
            self._process.wait()
        else:
            self._process.returncode = 0  # the server is not this process's child
        self._control.close()


def _imported() -> list[str]:
    """Return the names of the modules in shared packages that this process has imported."""
    return [
        name for name in list(sys.modules) if name.partition(".")[0] in _SHARED and "__main__" not in name
    ]


def _interpreter(function: str, *args: object) -> list[str]:
    """Return the command of a new interpreter that can import whatever this one can, and that calls a module's function."""
    module, _, name = function.rpartition(".")
    program = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {name}; {name}{args!r}"
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", program]


def serve(control_fd: int, caller: int, method: str) -> None:
    """Run the server's process."""
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    with _ending_with(caller, control):
        for name in _PRELOADED if method == "fork" else ():
            importlib.import_module(name)
    adopt_orphans()
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


def _import(names: list[str]) -> None:
    """Import these modules; a rank that needs one that cannot be imported here reports the error itself."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


@contextlib.contextmanager
def _ending_with(caller: int, control: socket.socket) -> Iterator[None]:
    """End this process as soon as the caller ends or closes its connection, even during an import."""

    def look(*_: object) -> None:
        # The connection is readable only once it is closed: nothing has been sent yet.
        if os.getppid() != caller or wait([control], 0):
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
        self._control = control
        self._caller = caller
        self._begin = self._fork if method == "fork" else self._exec
        self._pools: dict[Connection, _Pool] = {}
        # Kept, because a Popen that is garbage-collected reaps its process, and `_report` would not see how it ended.
        self._interpreters: list[subprocess.Popen[bytes]] = []
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
            for keeper in [keeper for keeper in self._pools if keeper in ready]:
                self._end(keeper)
            if self._control in ready and not self._start():
                return

    def end_all(self) -> None:
        for keeper in list(self._pools):
            self._end(keeper)

    def _start(self) -> bool:
        """Start a pool's ranks; return False if no request comes, because the caller has closed its connection."""
        length, fds, *_ = socket.recv_fds(self._control, 4, _MAX_FDS)
        if not length:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)
        request = self._control.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
        size, backend, temporary, imported = json.loads(request)
        if self._begin == self._fork:
            _import(imported)
            gc.freeze()  # else the collector of each rank would write to the shared pages of these modules, and copy them
        keeper = Connection(fds.pop(0))
        try:
            folder = tempfile.mkdtemp(prefix="minipar-", dir=temporary)
            pool = self._pools[keeper] = _Pool(folder, {})
            for rank in range(size):
                pool.ranks[self._begin(fds, rank, size, backend, folder)] = rank
            answer: tuple[str, object] = "started", (folder, list(pool.ranks))
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
            # Parent and child both do this, so that it is done before either continues.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            return pid
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(out, 1)
            os.dup2(err, 2)
            for own in (self._control, self._woken, self._wake):
                own.close()
            for keeper in self._pools:
                keeper.close()
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
        """Tell the callers which ranks have ended or were stopped. When a rank ends, its children are ended, too."""
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
                    self._end_orphans()
                    self._tell(keeper, "ended", (pool.ranks.pop(pid), os.waitstatus_to_exitcode(status)))

    def _end(self, keeper: Connection) -> None:
        """Kill a pool's ranks, delete its folder, and close the keeper, which tells the caller that this is done."""
        pool = self._pools.pop(keeper)
        for pid in pool.ranks:
            _kill_group(pid)
        for pid in pool.ranks:
            os.waitpid(pid, 0)
        self._end_orphans()
        shutil.rmtree(pool.folder, ignore_errors=True)
        keeper.close()

    def _end_orphans(self) -> None:
        """Kill processes that ended ranks left behind in other sessions: all children of this process but ranks.

        A daemon that a living rank of another pool has detached is killed too, because nothing tells which rank started it.
        """
        spared = {pid for pool in self._pools.values() for pid in pool.ranks}
        while orphans := children_of(os.getpid()) - spared:
            for pid in orphans:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except OSError:  # another user's process
                    spared.add(pid)

    def _tell(self, keeper: Connection, what: str, value: object) -> None:
        with contextlib.suppress(OSError):  # the caller has ended
            keeper.send((what, value))


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent ends. Has no effect except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(parent: int) -> set[int]:
    """Return the process ids of a process's children, from /proc; none where there is no /proc."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # pid (name) state parent ...; the name may have spaces and parentheses
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.add(int(stat.parent.name))
    return found


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
