"""An implementation in a file, loaded on each rank, so that what it does, hangs or breaks is done, hung or broken there."""

from __future__ import annotations

import json
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from minipar.runtime.caller import is_own
from minipar.trace import Span, Trace

COMPUTING_S = 8.0  # processor time of one run of a check, which takes about a tenth of a second
SLOWER = 4  # how many times as long it may take by the clock, on a busy machine; less than a wait's timeout
AGAIN_S = 0.5  # after which an implementation that caught the first Hangs gets another


class FromFile(NamedTuple):
    """The function or class `names[0]` of the file `path`; several names: a namespace of them.

    trace_to   None, or the folder to which each rank writes what it sent and when, for `recorded`
    limit_s    seconds that one run of a check may compute on a rank
    """

    path: str
    names: tuple[str, ...]
    trace_to: str | None = None
    limit_s: float = COMPUTING_S

    def module(self) -> types.ModuleType:
        """Run the file afresh. Files beside it can be imported."""
        file = Path(self.path)
        module = types.ModuleType(f"exercise_{file.stem}")
        module.__file__ = self.path
        sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        exec(compile(file.read_bytes(), self.path, "exec"), vars(module))
        return module

    def load(self):
        """Run the file and return the implementation."""
        module = self.module()
        if len(self.names) == 1:
            return getattr(module, self.names[0])
        return types.SimpleNamespace(**{name: getattr(module, name) for name in self.names})


def checked(world, body, implementation, *args):
    """On a rank: load the implementation, if it is in a file, and return body(world, implementation, *args), in time."""
    from_file = isinstance(implementation, FromFile)
    with deadline(implementation.limit_s if from_file else COMPUTING_S):
        if not from_file or implementation.trace_to is None:
            return body(world, implementation.load() if from_file else implementation, *args)
        world.barrier()
        world.trace = Trace()
        try:
            with world.trace.span("compute", "check"):
                return body(world, implementation.load(), *args)
        finally:
            file = Path(implementation.trace_to) / f"{world.rank}-of-{world.size}.json"
            file.write_text(json.dumps(world.trace.spans))


def recorded(folder: str | Path) -> dict[int, list[Span]]:
    """Return the spans of each rank of the largest world whose ranks wrote into the folder; {} if none did."""
    worlds: dict[int, dict[int, list[Span]]] = {}
    for file in Path(folder).glob("*-of-*.json"):
        rank, size = map(int, file.stem.split("-of-"))
        worlds.setdefault(size, {})[rank] = [Span(*span) for span in json.loads(file.read_text())]
    return dict(sorted(worlds[max(worlds)].items())) if worlds else {}


class Hangs(BaseException):
    """Not an Exception, so that `except Exception` in an implementation does not catch it."""


@contextmanager
def deadline(computing_s: float | None, clock_s: float | None = None) -> Iterator[None]:
    """Raise Hangs, with the line that is running, after so much processor time (None: any), or time by the clock.

    clock_s   None: four times the processor time
    Does nothing where the system has no such timers.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    clock_s = SLOWER * computing_s if clock_s is None else clock_s
    limits = [(signal.ITIMER_REAL, signal.SIGALRM, clock_s, f"{clock_s:g} s")]
    if computing_s is not None:
        limits.append((signal.ITIMER_PROF, signal.SIGPROF, computing_s, f"{computing_s:g} s of computing"))
    before = {}
    for timer, number, limit_s, words in limits:
        before[number] = signal.signal(number, lambda _, frame, words=words: _stop(frame, words))
        signal.setitimer(timer, limit_s, AGAIN_S)
    try:
        yield
    finally:
        for timer, number, _, _ in limits:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def _stop(frame, words: str) -> None:
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    where = f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})" if frame else ""
    raise Hangs(f"is still running after {words}{where}")
