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
from minipar.extras.dry_run.transport import Contents, RecordedTransport
from minipar.extras.dry_run.turns import Stuck, Turns

T = TypeVar("T")

# A rank's program. It is called with its world and with the mode that counts the bytes of its tensors.
RankProgram = Callable[[Comm, DryTensors], T]
# Makes the world of a rank, on which its program is recorded.
MakeWorld = Callable[[int, Contents, DryTensors], Comm]


class DryPrograms(NamedTuple, Generic[T]):
    """Recorded programs, the results of those that ended by rank, and the faults and assumptions in words."""

    programs: list[Program]
    results: dict[int, T]
    faults: list[str]
    assumed: list[str]


def run_ranks(size: int, program: RankProgram[T]) -> DryPrograms[T]:
    """Run `program(world, tensors)` for each of `size` ranks, then execute the records against each other.

    Raises Refused if a program reads tensor values that only a real run has.
    """
    members = tuple(range(size))

    def world(rank: int, contents: Contents, tensors: DryTensors) -> Comm:
        transport = RecordedTransport(members, rank, contents, tensors.has_contents, tensors.forget_contents)
        return Comm(transport, members, "world")

    done = record(members, world, program)
    return done._replace(faults=[*done.faults, *disagreements(done.programs)])


def record(ranks: Sequence[int], make_world: MakeWorld, program: RankProgram[T]) -> DryPrograms[T]:
    """Run and record the programs of these ranks. The records are not compared: the faults are only the errors raised.

    Raises Refused like `run_ranks`.
    """
    turns = Turns()
    contents = Contents(turns.wait_until)
    programs: dict[int, Program] = {}
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}
    assumed: set[str] = set()

    def run(rank: int) -> None:
        with shared.without_contents() as tensors:
            world = make_world(rank, contents, tensors)
            transport = world._transport
            assert isinstance(transport, RecordedTransport)
            programs[rank] = transport.program
            try:
                results[rank] = program(world, tensors)
                transport.program.ended = True
            except Stuck:
                pass
            except Exception as error:
                errors[rank] = error
            transport.recording = False
            assumed.update(tensors.assumed)

    with _no_garbage_collection(), AllRanks() as shared:
        turns.run([partial(run, rank) for rank in ranks])
    for error in errors.values():
        if isinstance(error, Refused):
            raise error
    faults = [f"rank {rank} raises {_one_line(error)}" for rank, error in sorted(errors.items())]
    results = dict(sorted(results.items()))
    return DryPrograms([programs[rank] for rank in ranks], results, faults, sorted(assumed))


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
