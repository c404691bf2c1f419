"""Programs of a user's own, started as he would start them and watched until their last process has ended."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent


class Program:
    """A script in a session and a folder for temporary files of its own."""

    def __init__(self, folder: Path, source: str, launcher: tuple[str, ...] = ()):
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        script = folder / "script.py"
        script.write_text(dedent(source))
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            start_new_session=True,
        )

    def read_line(self) -> str:
        return self.process.stdout.readline()

    def finish(self, timeout_s: float = 60) -> tuple[int, str, str]:
        """Exit status, stdout and stderr, once nobody holds these open: so an orphan runs into the timeout."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            raise
        return self.process.returncode, out, err

    def leftovers(self) -> list[str]:
        return [path.name for path in self.temporary.glob("minipar-*")]
