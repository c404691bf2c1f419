"""A rank's process as the caller sees it: the caller's ends of its pipes, and how the process ended."""

from __future__ import annotations

from multiprocessing import Pipe

from minipar.runtime.output import Output


class RankProcess:
    """The caller's ends of a rank's message pipe and output streams, and what is known of the process.

    theirs  the other ends of the pipes, which the process gets
    ended   None, or how the process ended
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.pid = 0
        self.ended: str | None = None
        self.stopped = False
        self.pipe, pipe = Pipe()
        out, far_out = Pipe(duplex=False)
        err, far_err = Pipe(duplex=False)
        self.outputs = Output(out, rank, "stdout"), Output(err, rank, "stderr")
        self.theirs = [pipe, far_out, far_err]

    def close(self) -> None:
        for output in self.outputs:
            output.close()
        for end in (self.pipe, *self.theirs):
            end.close()
