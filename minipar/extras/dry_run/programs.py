"""Run the programs of ranks in threads of this process, one at a time, on tensors without values and without messages."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from minipar.comm import Comm
from minipar.extras.dry_run.matching import disagreements
from minipar.extras.dry_run.reads import AllRanks
from minipar.extras.dry_run.record import Program, Refused
from minipar.extras.dry_run.tensors import DryTensors
from minipar.extras.dry_run.transport import Contents, RecordedComm, RecordedTransport
from minipar.extras.dry_run.turns import Stuck, Turns

T = TypeVar("T")

# A rank's program. It is called with its world and with the mode that counts the bytes of its tensors.
RankProgram = Callable[[Comm, DryTensors], T]


class DryPrograms(NamedTuple, Generic[T]):
    """Recorded programs, the results of those that ended by rank, and the faults and assumptions in words."""

    programs: list[Program]
    results: dict[int, T]
    faults: list[str]
    assumed: list[str]


def run_ranks(size: int, program: RankProgram[T], first: Sequence[int] | None = None) -> DryPrograms[T]:
    """Run `program(world, tensors)` for each of `size` ranks, then match the records of all.

    first  the rank that is run in place of each rank; None: every rank is run

    Raises Refused if a program reads tensor values that only a real run has.
    """
    members = tuple(range(size))
    first = first or members
    ranks = sorted(set(first))
    turns = Turns()
    contents = Contents(first, turns.wait_until)
    programs: dict[int, Program] = {}
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}
    assumed: set[str] = set()
    stuck: list[str] = []

    def run(rank: int) -> None:
        with shared.without_contents() as tensors:
            transport = RecordedTransport(members, rank, contents, tensors)
            programs[rank] = transport.program
            try:
                results[rank] = program(RecordedComm(transport, members, "world"), tensors)
                transport.program.ended = True
            except Stuck as error:
                stuck.append(f"rank {rank} waits for whole numbers: {error}")
            except Exception as error:
                errors[rank] = error
            transport.recording = False
            assumed.update(tensors.assumed)

    with _no_garbage_collection(), AllRanks() as shared:
        turns.run([partial(run, rank) for rank in ranks])
    for error in errors.values():
        if isinstance(error, Refused):
            raise error
    recorded = [programs[rank] for rank in ranks]
    faults = [f"rank {rank} raises {_one_line(error)}" for rank, error in sorted(errors.items())]
    faults += disagreements(recorded) or sorted(stuck)
    return DryPrograms(recorded, dict(sorted(results.items())), faults, sorted(assumed))


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


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300)}"
