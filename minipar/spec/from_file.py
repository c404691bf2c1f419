"""An implementation in a file, loaded on the ranks, so that only their processes hang or crash."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from minipar.comm import Comm
from minipar.runtime.caller import is_own
from minipar.spec.convention import stated
from minipar.spec.counted import TORCHS, within
from minipar.spec.witness import Watched, Witness
from minipar.spec.words import Wrong
from minipar.support.trace import Span, Trace

Implementation = Callable[..., Any]  # with the signature that the specification gives

# Limit on the processor time of one run of a check, which normally takes a tenth of a second.
COMPUTING_S = 8.0
SLOWER = 4  # the wall-clock limit, in COMPUTING_S: long, for busy machines, but below a wait's timeout
AGAIN_S = 0.5  # after this time, Hangs is raised again, in case the implementation caught the first one


class FromFile(NamedTuple):
    """The function or class `names[0]` in the file `path`; for several names, a namespace with all of them.

    path       a file, or the name of a module, which is imported on each rank, from the working folder too
    trace_to   None, or the folder to which each rank writes its trace, for `recorded`
    limit_s    limit on the processor time of one run of a check on a rank, in seconds
    """

    path: str
    names: tuple[str, ...]
    trace_to: str | None = None
    limit_s: float = COMPUTING_S

    def module(self) -> types.ModuleType:
        """Run the file again, and return it as a module. It can import files in its folder."""
        file = Path(self.path)
        if file.suffix != ".py":
            sys.path.insert(0, os.getcwd())
            return importlib.import_module(self.path)
        module = types.ModuleType(f"exercise_{file.stem}")
        module.__file__ = self.path
        sys.modules[module.__name__] = module  # where dataclasses and pickle look for the module
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        exec(compile(file.read_bytes(), self.path, "exec"), vars(module))
        return module

    def load(self) -> Any:
        """Run the file and return the implementation."""
        module = self.module()
        if len(self.names) == 1:
            return getattr(module, self.names[0])
        return types.SimpleNamespace(**{name: getattr(module, name) for name in self.names})


class OnComm(NamedTuple):
    """An implementation to check on a Comm other than the library's: the context `entered(world)` gives a rank its Comm."""

    implementation: Implementation | FromFile
    entered: Callable[[Comm], AbstractContextManager[Any]]


class Note(NamedTuple):
    """The part of a stage's report that is not its verdict.

    conventions  those that the implementation states
    sent         bytes that rank 0 sent through torch.distributed when they were last counted, by kind
    asked        whether rank 0 called the implementation
    """

    conventions: tuple[str, ...]
    sent: dict[str, int]
    asked: bool


Subject = Implementation | FromFile | OnComm  # what is checked


def checked(
    world: Comm,
    body: Callable[..., str | None],
    implementation: Subject,
    writes: tuple[int, ...] | None = (),
    groupings: Sequence[Sequence[Sequence[int]]] | None = None,
    guarded: bool = False,
) -> str | None:
    """Load the implementation, if it is in a file, and return body(world, implementation), or what was written to.

    writes      the arguments, by position, that the implementation may write to; None: nothing is watched
    groupings   run the body in this rank's group of each of these in turn, and not on the world
    guarded     refuse torch.distributed on groups of more ranks than the Comm has, for which the rest would wait

    Raises Hangs where this takes too long.
    """
    if isinstance(implementation, OnComm):
        with implementation.entered(world) as other:
            return checked(other, body, implementation.implementation, writes, groupings)
    trace, trace_to, limit_s = Trace(), None, COMPUTING_S
    if isinstance(implementation, FromFile):
        limit_s, trace_to = implementation.limit_s, implementation.trace_to
    if trace_to is not None:
        world.barrier()
        world.trace = trace
    witness, said = Witness(), tuple[str, ...]()
    with deadline(limit_s), on_device(world):
        try:
            if isinstance(implementation, FromFile):
                implementation = implementation.load()
            said = stated(implementation)
            witness = Witness(writes, said)
            watched = Watched(implementation, witness)
            if world.size == 1 and "two ranks or more" in said:
                return None
            for number, comm in enumerate(_comms(world, groupings)):
                guard = guarded and number == 0 and hasattr(comm, "process_group")
                with within(comm) if guard else nullcontext():
                    try:
                        words = body(comm, watched)
                    except Wrong as error:
                        words = str(error)
                if words := witness.written() or words:  # what was written to may be why the rest is wrong
                    return words if words.startswith("rank") else f"rank {comm.rank}: {words}"
            return None
        finally:
            if world.rank == 0 and hasattr(world, "report"):
                sent = {kind: n for kind, n in world.traffic.by_kind.items() if TORCHS in kind}
                world.report(Note(said, sent, witness.asked))
            if trace_to is not None:
                file = Path(trace_to) / f"{world.rank}-of-{world.size}.json"
                file.write_text(json.dumps(trace.spans))


def on_device(world: Comm) -> AbstractContextManager[Any]:
    """Return a context in which new tensors are on the device of `world`."""
    device = getattr(world, "device", torch.device("cpu"))
    return nullcontext() if device.type == "cpu" else device


def _comms(world: Comm, groupings: Sequence[Sequence[Sequence[int]]] | None) -> Iterator[Comm]:
    """Yield the world or, for each grouping in turn, the Comm of the group that this rank is in."""
    if groupings is None:
        yield world
    for number, groups in enumerate(groupings or ()):
        mine = next(group for group in groups if world.rank in group)
        yield world.subgroup(mine, f"grouping {number}")


def recorded(folder: str | Path) -> dict[int, list[Span]]:
    """Return each rank's spans, of the largest world whose ranks wrote into the folder; {} if no rank did."""
    worlds: dict[int, dict[int, list[Span]]] = {}
    for file in Path(folder).glob("*-of-*.json"):
        rank, size = map(int, file.stem.split("-of-"))
        worlds.setdefault(size, {})[rank] = [Span(*span) for span in json.loads(file.read_text())]
    return dict(sorted(worlds[max(worlds)].items())) if worlds else {}


class Hangs(BaseException):
    """An implementation takes too long. It is no Exception, so that an implementation's `except Exception` misses it."""


@contextmanager
def deadline(computing_s: float | None, clock_s: float | None = None) -> Iterator[None]:
    """Raise Hangs, with the line that is running, after `computing_s` of processor time or `clock_s` of wall-clock time.

    computing_s   None: no limit
    clock_s       None: SLOWER times `computing_s`

    Does nothing where the system has no such timers.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    if clock_s is None:
        assert computing_s is not None
        clock_s = SLOWER * computing_s
    limits = [(signal.ITIMER_REAL, signal.SIGALRM, clock_s, f"{clock_s:g} s")]
    if computing_s is not None:
        limits.append((signal.ITIMER_PROF, signal.SIGPROF, computing_s, f"{computing_s:g} s of computing"))
    before = {}
    for timer, number, limit_s, words in limits:
        before[number] = signal.signal(number, partial(_stop, words))
        signal.setitimer(timer, limit_s, AGAIN_S)
    try:
        yield
    finally:
        for timer, number, _, _ in limits:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def _stop(words: str, number: int, frame: FrameType | None) -> None:
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    where = f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})" if frame else ""
    raise Hangs(f"is still running after {words}{where}")
