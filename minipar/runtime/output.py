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
        self._rest: list[bytes] = []  # the beginning of a line that is not complete yet, as it was read
        self._shown = (
            False  # whether something that a carriage return ended is printed since the last newline
        )
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
        lines = []
        for piece in data.splitlines(keepends=True):
            text = piece.rstrip(b"\r\n")
            self._rest.append(text)
            if len(piece) == len(text):
                break
            line, newline = self._take_rest(), piece.endswith(b"\n")
            if line or (newline and not self._shown):
                lines.append(line)
            self._shown = not newline and (self._shown or bool(line))
        self._print(lines)

    def finish(self) -> None:
        """Print all output that has arrived, including a last line without an end."""
        if self.open:
            self.forward()
        self._print(list(filter(None, [self._take_rest()])))
        self._shown = False

    def close(self) -> None:
        self.open = False
        self._source.close()

    def _take_rest(self) -> bytes:
        rest = b"".join(self._rest)
        self._rest.clear()
        return rest

    def _print(self, lines: list[bytes]) -> None:
        if lines:
            shown = (f"[rank {self._rank}] {line.decode(errors='replace')}" for line in lines)
            stream = getattr(sys, self._name)
            print(_encodable("\n".join(shown), getattr(stream, "encoding", None)), file=stream, flush=True)


def _encodable(text: str, encoding: str | None) -> str:
    """Return a text with an escape in place of every character that a stream of this encoding cannot show."""
    return text.encode(encoding, "backslashreplace").decode(encoding) if encoding else text
