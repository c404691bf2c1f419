"""Programs of a user's own, started as he would start them and watched until their last process has ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent


def interruptible() -> None:
    """Let SIGINT interrupt a new process (its `preexec_fn`), also where this one was started in a script's background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Program:
    """A script in a session and a folder for temporary files of its own, by which its processes are told."""

    def __init__(
        self, folder: Path, source: str, launcher: tuple[str, ...] = (), words: tuple[str, ...] = ()
    ):
        self.temporary = folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        script = folder / "script.py"
        script.write_text(dedent(source))
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(script), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            start_new_session=True,
            preexec_fn=interruptible,
        )

    def read_line(self) -> str:
        return self.process.stdout.readline()

    def finish(self, timeout_s: float = 300) -> tuple[int, str, str]:
        """Exit status, stdout and stderr, once nobody holds these open: so an orphan runs into the timeout."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            raise
        return self.process.returncode, out, err

    def leftovers(self) -> list[str]:
        return [path.name for path in self.temporary.glob("minipar-*")]

    def survivors(self, timeout_s: float = 60) -> list[str]:
        """The command lines of its processes, of its children's children too, that do not end within this time."""
        mine, deadline = f"TMPDIR={self.temporary}".encode(), time.monotonic() + timeout_s
        while (living := [p for p in Path("/proc").glob("[0-9]*") if mine in _environment(p)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return [(process / "cmdline").read_text() for process in living]


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")  # empty where it has ended
    except OSError:
        return []
