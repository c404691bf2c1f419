"""A dry run by symmetry: run the first rank of each kind in place of all its ranks, and the last rank as a check.

Two ranks are of one kind if their coordinates differ only along axes on which all ranks run the same program (dp and tp,
for the trainer). The records of a kind's ranks should then be equal: they name no rank (`kind_transport.py`).

If all ranks of a kind have the same record, the ranks of a mesh can be taken to run in lockstep. It is then enough to
execute one rank of each kind against one rank of every other kind (`matching.py`): if rank i sends to rank i + d, then by
symmetry rank i - d sends to rank i. Here a collective ends only when all ranks have called it. In a run, a rank may leave a
collective before all ranks have called it, so a program that ends here also ends in a run. Each distinct collective is
checked separately (`prove.py`).

Only the first and the last rank of each kind are compared. The ranks between them are assumed to have the same record, so
a fault of one of these alone is not found.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic

from minipar.comm.transport.messages import ChannelId
from minipar.extras.dry_run.call import Call
from minipar.extras.dry_run.kind_transport import KindComm, KindTransport, Worlds
from minipar.extras.dry_run.matching import disagreements
from minipar.extras.dry_run.programs import RankProgram, T, record
from minipar.extras.dry_run.prove import Proven, prove
from minipar.extras.dry_run.record import Program, Refused, difference
from minipar.mesh import Mesh


@dataclass
class KindsRun(Generic[T]):
    """The result of `run_kinds`.

    programs     the record of the first rank of each kind
    results      rank -> its result, for the ranks that were run
    kinds        first rank of a kind -> all its ranks
    checked      first rank of a kind -> the last rank, whose record was compared; a kind of one rank has none
    collectives  each distinct collective call -> how it was checked
    messages, sent_bytes   totals over all ranks
    """

    programs: list[Program]
    results: dict[int, T]
    faults: list[str]
    assumed: list[str]
    kinds: dict[int, list[int]]
    checked: dict[int, int]
    collectives: dict[Call, Proven]
    messages: int
    sent_bytes: int


def run_kinds(mesh: Mesh, alike: Sequence[str], program: RankProgram[T]) -> KindsRun[T]:
    """Run the first and the last rank of each kind of a mesh, and conclude for all ranks, as this module explains.

    mesh   built from a number of ranks
    alike  the axes of (pp, dp, cp, tp) along which ranks are of one kind

    Raises Refused like `run_ranks`, and if the first and last rank of a kind do not have the same record.
    """
    members = tuple(range(mesh.world_size))
    firsts = [_first_of_kind(mesh, rank, alike) for rank in members]
    kinds: dict[int, list[int]] = defaultdict(list)
    for rank, first in zip(members, firsts):
        kinds[first].append(rank)
    checked = {first: ranks[-1] for first, ranks in kinds.items() if len(ranks) > 1}
    worlds = Worlds(members, firsts.__getitem__, KindComm, checked)
    done = record([*kinds, *checked.values()], worlds.make, program)
    for first, last in checked.items():
        _require_alike(worlds.transports[first], worlds.transports[last])
    programs = [worlds.transports[first].program for first in kinds]
    faults = [*done.faults, *disagreements(programs)]
    calls = [(channel, call) for first in kinds for channel, call in worlds.transports[first].called]
    proven = {call: prove(call) for call in dict.fromkeys(call for _, call in calls if call.size > 1)}
    faults += [f"{call}: {fault}" for call, found in proven.items() for fault in found.faults]
    messages, sent_bytes = _totals(worlds, kinds, proven)
    return KindsRun(
        programs, done.results, faults, done.assumed, dict(kinds), checked, proven, messages, sent_bytes
    )


def _first_of_kind(mesh: Mesh, rank: int, alike: Sequence[str]) -> int:
    """Return the rank with coordinate 0 along the axes `alike`, and the coordinates of `rank` along the other axes."""
    return rank - sum(rank // mesh.stride(axis) % mesh.sizes[axis] * mesh.stride(axis) for axis in alike)


def _require_alike(a: KindTransport, b: KindTransport) -> None:
    """Raise Refused if the first and the last rank of a kind do not have the same record."""
    found = difference(a.program, b.program)
    for of_a, of_b in zip_longest(a.called, b.called):
        if not found and of_a != of_b:
            found = f"one calls {_on(of_a)}, and the other {_on(of_b)}"
    if not found and a.contents_sent != b.contents_sent:
        found = "they send different whole numbers"
    if found:
        raise Refused(
            f"ranks {a.rank} and {b.rank} are not of one kind: {found}; nothing follows for the ranks between them"
        )


def _on(called: tuple[ChannelId, Call] | None) -> str:
    return "nothing" if called is None else f"{called[1]} on {called[0]}"


def _totals(worlds: Worlds, kinds: dict[int, list[int]], proven: dict[Call, Proven]) -> tuple[int, int]:
    """Return the number and bytes of all ranks' messages.

    A collective is called by every kind in its group, but its total is added only once, for the first of these kinds. If
    only a smaller group was checked, there is no total, and the messages that each kind's ranks sent are added.
    """
    messages = sent_bytes = 0
    for first, ranks in kinds.items():
        transport = worlds.transports[first]
        messages += transport.own_sent[0] * len(ranks)
        sent_bytes += transport.own_sent[1] * len(ranks)
        for (channel, call), times in Counter(transport.called).items():
            if call.size > 1 and proven[call].how != "smaller" and channel.ranks[0] == first:
                groups = sum(len(kinds[kind]) for kind in channel.ranks) // call.size
                messages += times * groups * proven[call].messages
                sent_bytes += times * groups * proven[call].sent_bytes
        for call, (number, num_bytes) in transport.sent_in.items():
            if call.size > 1 and proven[call].how == "smaller":
                messages += number * len(ranks)
                sent_bytes += num_bytes * len(ranks)
    return messages, sent_bytes
