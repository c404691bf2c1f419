"""Output of ranks. A rank's stdout and stderr are pipes, so that all output arrives, even from C code, from child processes
and from a crash. The caller prints it line by line, each line with its rank."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection


class Output:
    """The caller's end of one stream of a rank."""

    def __init__(self, source: Connection, rank: int, name: str):
        self._source, self._rank, self._name = source, rank, name
        self._rest = b""  # the beginning of a line that is not complete yet
        self.open = True
        os.set_blocking(source.fileno(), False)

    def fileno(self) -> int:
        return self._source.fileno()

    def forward(self) -> None:
        """Print the complete lines that have arrived. A carriage return ends a line, too, because progress bars use it."""
        try:
            data = os.read(self.fileno(), 1 << 20)  # at most 1 MiB, which is more than a pipe holds
        except BlockingIOError:
            return
        self.open = bool(data)
        *lines, last = (self._rest + data).split(b"\n")
        overwritten, _, self._rest = last.rpartition(b"\r")
        self._print(lines + [overwritten] * bool(overwritten))

    def finish(self) -> None:
        """Print all output that has arrived, including a last line without an end."""
        if self.open:
            self.forward()
        if self._rest:
            self._print([self._rest])
            self._rest = b""

    def close(self) -> None:
        self.open = False
        self._source.close()

    def _print(self, lines: list[bytes]) -> None:
        parts = [part for line in lines for part in list(filter(None, line.split(b"\r"))) or [b""]]
        if parts:
            shown = (f"[rank {self._rank}] {part.decode(errors='replace')}" for part in parts)
            print(*shown, sep="\n", file=getattr(sys, self._name), flush=True)
