"""Two hosts on one machine: network namespaces, joined by a link as slow as one likes, that nothing else can reach."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # of a network of their own: nobody else can see them
DEVICE = "slow0"  # each host's end of the link


def why_not() -> str | None:
    """Why hosts cannot be made here, or None."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"needs {' and '.join(missing)}, of iproute2" if missing else None


class TwoHosts:
    """Two namespaces with a link of `rate` either way, and on each the ranks of torchrun; gone when the context ends.

    folder  where programs write what they print
    rate    as `tc` has it: "200mbit"
    Raises OSError, with what the system said, where a namespace or the link cannot be made.
    """

    def __init__(self, folder: Path, rate: str):
        self._folder, self._rate, self._runs = folder, rate, 0
        self.names = tuple(f"minipar-{os.getpid()}-{host}" for host in range(2))
        self._programs: list[subprocess.Popen] = []

    def __enter__(self) -> TwoHosts:
        try:
            self._remove_orphans()
            for name in self.names:
                _system("ip", "netns", "add", name)
            a, b = self.names
            _system(
                "ip", "link", "add", DEVICE, "netns", a, "type", "veth", "peer", "name", DEVICE, "netns", b
            )
            for name, address in zip(self.names, ADDRESSES):
                _system("ip", "-n", name, "link", "set", "lo", "up")
                _system("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
                _system("ip", "-n", name, "link", "set", DEVICE, "up")
                slow = ("tbf", "rate", self._rate, "burst", "64kb", "latency", "400ms")
                _system("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *slow)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc) -> None:
        """End every process on the hosts, then the hosts: the link goes with them."""
        for name in self.names:
            if name in _namespaces():
                _empty(name)
                _system("ip", "netns", "delete", name)
        for program in self._programs:
            program.wait()

    def torchrun(self, *program: str, restarts: int = 0, timeout_s: float = 600) -> str:
        """Run `python -m torch.distributed.run ... program`, two ranks a host; what was printed, once both ended well."""
        self._runs += 1
        printed = [self._folder / f"run{self._runs}-host{host}.txt" for host in range(2)]
        started = [self._start(host, restarts, program, file) for host, file in enumerate(printed)]
        deadline = time.monotonic() + timeout_s
        try:
            ended = [program.wait(max(0, deadline - time.monotonic())) for program in started]
        except subprocess.TimeoutExpired:
            ended = f"not within {timeout_s} s"
        finally:
            for name in self.names:
                _empty(name)
        said = "\n".join(file.read_text() for file in printed)
        assert ended == [0, 0], f"exit statuses: {ended}\n{said}"
        return said

    def _start(self, host: int, restarts: int, program, printed: Path) -> subprocess.Popen:
        port = 29500 + self._runs
        if restarts:  # all hosts restart together, which they must agree on
            meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{port}")
            # Both hosts have the machine's name, so torchrun is told who is who.
            meet += ("--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", ADDRESSES[host])
            meet += ("--max-restarts", str(restarts))
        else:
            meet = ("--node-rank", str(host), "--master-addr", ADDRESSES[0], "--master-port", str(port))
        meet += ("--log-dir", str(printed.with_suffix(".logs")))
        launcher = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *meet)
        with printed.open("w") as file:
            started = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], sys.executable, *launcher, *program],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches the test alone, which then ends them all
            )
        self._programs.append(started)
        return started

    @staticmethod
    def _remove_orphans() -> None:
        """Hosts whose test was killed before it could remove them."""
        for name in _namespaces():
            owner = name.split("-")[1] if name.startswith("minipar-") else ""
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                _empty(name)
                _system("ip", "netns", "delete", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _system("ip", "netns", "list").splitlines()]


def _empty(namespace: str) -> None:
    """Kill what runs there, until nothing does: torchrun, too, starts processes in sessions of their own."""
    while pids := _system("ip", "netns", "pids", namespace).split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


def _system(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise OSError(str(error)) from None
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
