"""Run the programs of ranks in threads of this process, one at a time, on tensors without values and without messages."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any, Generic, TypeVar

from minipar.comm import Comm
from minipar.extras.dry_run.matching import disagreements
from minipar.extras.dry_run.reads import replaced
from minipar.extras.dry_run.record import Program, Refused, Unknown
from minipar.extras.dry_run.shapes import KnownShapes
from minipar.extras.dry_run.tensors import DryTensors
from minipar.extras.dry_run.transport import Contents, RecordedTransport
from minipar.extras.dry_run.turns import Stuck

T = TypeVar("T")

# A rank's program. It is called with its world and with the mode that counts the bytes of its tensors.
RankProgram = Callable[[Comm, DryTensors], T]


@dataclass
class DryPrograms(Generic[T]):
    """Recorded programs, the results of those that ended by rank, and the faults and assumptions in words."""

    programs: list[Program]
    results: dict[int, T]
    faults: list[str]
    assumed: list[str]

    @property
    def num_messages(self) -> int:
        return sum(1 for program in self.programs for _ in program.messages())


def run_ranks(size: int, program: RankProgram[T]) -> DryPrograms[T]:
    """Run `program(world, tensors)` for each of `size` ranks, then execute the records against each other.

    Raises Refused if a program reads tensor values that only a real run has.
    """
    done = record(size, range(size), program)
    done.faults += disagreements(done.programs)
    return done


def record(
    size: int, ranks: Iterable[int], program: RankProgram[T], comm_class: type[Comm] = Comm, kinds: Any = None
) -> DryPrograms[T]:
    """Run and record the programs of these ranks. The records are not compared: the faults are only the errors raised.

    Raises Refused like `run_ranks`.
    """
    members, shapes = tuple(range(size)), KnownShapes()
    programs = {rank: Program(rank) for rank in ranks}
    contents = Contents(programs.keys(), kinds)
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}
    assumed: set[str] = set()

    def run(own: Program) -> None:
        with DryTensors(shapes) as tensors:
            transport = RecordedTransport(members, own, contents, tensors)
            try:
                results[own.rank] = program(comm_class(transport, members, "world"), tensors)
                own.ended = True
            except Stuck:
                pass
            except Exception as error:
                errors[own.rank] = error
            transport.recording = False
            assumed.update(tensors.assumed)

    with _no_garbage_collection(), replaced():
        contents.run(partial(run, own) for own in programs.values())
    for _, error in sorted(errors.items()):
        if isinstance(error, Unknown):
            raise Refused(_who_reads(error)) from error
        if isinstance(error, Refused):
            raise error
    faults = [f"rank {rank} raises {_one_line(error)}" for rank, error in sorted(errors.items())]
    return DryPrograms(list(programs.values()), dict(sorted(results.items())), faults, sorted(assumed))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Free memory by reference counts alone, so that a peak does not depend on when Python collects garbage."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # so that an explicit collection is fast: it skips the objects that torch has loaded
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _who_reads(error: Unknown) -> str:
    """Say which function has read a tensor without values: the last one that is not of this package."""
    calls = [
        call
        for call in extract_tb(error.__traceback__)
        if Path(call.filename).parent != Path(__file__).parent
    ]
    return (
        f"{calls[-1].name} ({'/'.join(Path(calls[-1].filename).parts[-2:])}, line {calls[-1].lineno}) decides by numbers "
        "that only a real run has, and a dry run assumes nothing about them; leave out the option that needs it"
    )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300)}"
