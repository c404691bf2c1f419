"""Check a collective apart from the program: run three of its ranks if their records are equal, else all of them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from minipar.comm import Comm
from minipar.extras.dry_run.call import Call
from minipar.extras.dry_run.kind_transport import Worlds
from minipar.extras.dry_run.matching import disagreements
from minipar.extras.dry_run.programs import DryPrograms, record, run_ranks
from minipar.extras.dry_run.record import difference

FEW = 4  # in groups of at most this many ranks, all ranks are run
MOST_STEPS = 200_000


class Proven(NamedTuple):
    """The result of checking a collective: its faults, and the messages and bytes that all its ranks send together.

    how   "whole": all its ranks were run; "alike": three, with equal records; "smaller": all of a smaller group
    """

    faults: list[str]
    messages: int
    sent_bytes: int
    how: Literal["whole", "alike", "smaller"]


def prove(call: Call) -> Proven:
    """Check a collective. Run its first two ranks and the last one; if their records differ, run all its ranks.

    If all ranks would take more than MOST_STEPS steps, a smaller group is run.
    """
    p = call.size
    if p > FEW:
        worlds = Worlds(tuple(range(p)), lambda rank: 0, Comm)
        done: DryPrograms[None] = record((0, 1, p - 1), worlds.make, call.run)
        first, second, last = done.programs
        ended = all(program.ended for program in done.programs)
        if ended and not difference(first, second) and not difference(first, last):
            sent = list(first.messages())
            faults = disagreements(done.programs[:1])
            return Proven(faults, p * len(sent), p * sum(m.num_bytes for m in sent), "alike")
        steps = p * (2 * first.num_posts + len(call.sizes or ()))
        if steps > MOST_STEPS:
            return _run_whole(_smaller(call))._replace(how="smaller")
    return _run_whole(call)


def _run_whole(call: Call) -> Proven:
    whole: DryPrograms[None] = run_ranks(call.size, call.run)
    sent = [message for program in whole.programs for message in program.messages()]
    return Proven(whole.faults, len(sent), sum(m.num_bytes for m in sent), "whole")


def _smaller(call: Call) -> Call:
    """Return the same collective on fewer ranks: 32 if its size is a power of two, which some algorithms need, else 24."""
    fewer = 32 if call.size & (call.size - 1) == 0 else 24
    sizes = call.sizes and tuple(call.sizes[i * call.size // fewer] for i in range(fewer))
    rows = call.shape[0] if call.shape else 0
    if sizes is not None and call.kind in ("reduce_scatter", "all_to_all"):
        rows = sum(sizes)
    shape = call.shape if sizes is None or call.kind == "all_gather" else (rows, *call.shape[1:])
    return call._replace(
        size=fewer, sizes=sizes, shape=shape, root=call.root and call.root * fewer // call.size
    )
