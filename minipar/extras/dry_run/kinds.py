"""A dry run by symmetry: run the first rank of each kind in place of all its ranks, and the last rank as a check.

Two ranks are of one kind if their coordinates differ only along axes on which all ranks run the same program (dp and tp,
for the trainer). The records of a kind's ranks are then equal, in words that name no rank (`Kinds.program`).

If all ranks of a kind have the same record, the ranks of a mesh can be taken to run in lockstep. It is then enough to
execute one rank of each kind against one rank of every other kind (`matching.py`): if rank i sends to rank i + d, then by
symmetry rank i - d sends to rank i. Here a collective ends only when all ranks have called it. In a run, a rank may leave a
collective before all ranks have called it, so a program that ends here also ends in a run. Each distinct collective is
run by itself (`call.py`), unless its ranks send more than MOST_MESSAGES.

Only the first and the last rank of each kind are compared. The ranks between them are assumed to have the same record, so
a fault of one of these alone is not found.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.transport.messages import ChannelId, Message
from minipar.extras.dry_run.call import Call, call_of
from minipar.extras.dry_run.matching import disagreements
from minipar.extras.dry_run.programs import DryPrograms, RankProgram, T, record, run_ranks
from minipar.extras.dry_run.record import Make, Post, Program, Recorded, Refused, Step, Wait, difference
from minipar.extras.dry_run.transport import RecordedTransport
from minipar.mesh import Mesh

MOST_MESSAGES = 4_000


class Group(NamedTuple):
    """The members of a channel by kind.

    kinds    the first rank of each kind
    places   rank -> the first of its kind, and its index among the members of that kind
    of_each  number of members of each kind; 0 if the kinds have different numbers of members
    """

    kinds: tuple[int, ...]
    places: dict[int, tuple[int, int]]
    of_each: int


class Kinds:
    """The kinds of a mesh's ranks.

    first    rank -> the first of its kind
    ranks    first rank of a kind -> all its ranks
    checked  first rank of a kind -> the last, whose record is compared; a kind of one rank has none
    given    (channel in kinds, number of a collective) -> rank -> the integers that it passed
    """

    def __init__(self, mesh: Mesh, alike: Sequence[str]):
        self.ranks: dict[int, list[int]] = defaultdict(list)
        strides = [(mesh.stride(axis), mesh.sizes[axis]) for axis in alike]
        self.first = [
            rank - sum(rank // stride % size * stride for stride, size in strides)
            for rank in range(mesh.world_size)
        ]
        for rank, first in enumerate(self.first):
            self.ranks[first].append(rank)
        self.checked = {first: ranks[-1] for first, ranks in self.ranks.items() if len(ranks) > 1}
        self.given: dict[object, dict[int, list[Any]]] = defaultdict(dict)
        self._groups: dict[ChannelId, Group] = {}

    def group(self, channel: ChannelId) -> Group:
        if channel not in self._groups:
            met: Counter[int] = Counter()
            places = {}
            for rank in channel.ranks:
                kind = self.first[rank]
                places[rank] = kind, met[kind]
                met[kind] += 1
            of_each = met[kind] if len(set(met.values())) == 1 else 0
            self._groups[channel] = Group(tuple(sorted(met)), places, of_each)
        return self._groups[channel]

    def named(self, channel: ChannelId) -> ChannelId:
        """Return a channel in words that name no rank: its name, and the kinds of its members."""
        return ChannelId(channel.name, self.group(channel).kinds)

    def program(self, own: Program) -> Program:
        """Return a rank's program in words that are equal for all ranks of its kind.

        A message has the kind of its peer, and in its channel's name an offset: number the group's members of each kind
        from 0; the offset is the receiver's number minus the sender's. A collective is an empty message to and from every
        other kind in the group.
        """
        calls: Counter[ChannelId] = Counter()

        def message(of: Message | None) -> Message | None:
            if of is None:
                return None
            group = self.group(of.channel)
            if not group.of_each:
                raise Refused(
                    f"{of.channel} has different numbers of ranks of each kind: {of} has no counterpart by symmetry; "
                    "run every rank"
                )
            kind, place = group.places[of.peer]
            by = place - group.places[own.rank][1]
            by = (by if of.verb == "send" else -by) % group.of_each
            name = f"{of.channel.name}, {by} places on" if by else of.channel.name
            return of._replace(peer=kind, channel=ChannelId(name, group.kinds))

        def step(of: Any) -> Any:
            if isinstance(of, Make):
                return Make(self.named(of.channel))
            if isinstance(of, Post):
                return Post(message(of.send), message(of.receive))
            return Wait(step(of.on)) if isinstance(of, Wait) else of

        def meeting(of: Recorded) -> list[Step]:
            kinds, channel = self.group(of.channel).kinds, self.named(of.channel)
            at, called = kinds.index(self.first[own.rank]), calls[channel]
            calls[channel] += 1
            steps: list[Step] = []
            for distance in range(1, len(kinds)):
                to, source = kinds[(at + distance) % len(kinds)], kinds[at - distance]
                what = channel, "collective", called, 0, of.words
                steps.append(Post(Message("send", to, *what), Message("receive", source, *what)))
            return steps

        program = Program(self.first[own.rank], [step(of) for of in own.main], ended=own.ended)
        for of in own.operations:
            steps = meeting(of) if of.call else [step(one) for one in of.steps]
            program.operations.append(Recorded(self.named(of.channel), steps, of.words, of.call))
        return program


class KindComm(Comm):
    """The Comm of a rank that is run in place of its kind. A collective's record is a call, without its messages."""

    def _collective(self, kind: str, algorithm: str, async_op: bool, x: Tensor, **given: Any) -> Any:
        transport = self._transport
        assert isinstance(transport, RecordedTransport)
        if transport.running:  # a collective that is part of another one
            return super()._collective(kind, algorithm, async_op, x, **given)
        operations = transport.program.operations
        number, call = len(operations), call_of(self, kind, algorithm, x, given)
        whole = not x.is_floating_point() and transport.tensors.has_contents(x)
        own = x.detach().tolist() if whole else []  # a list: a tensor would be counted as memory of this rank
        try:
            result = super()._collective(kind, algorithm, async_op, x, **given)
        finally:
            for of in operations[number : number + 1]:  # none if an earlier result is returned again
                of.call, of.num_sent = (
                    call,
                    sum(isinstance(step, Post) and bool(step.send) for step in of.steps),
                )
                of.steps.clear()
        if whole and kind == "all_gather" and isinstance(result, Tensor):
            return self._all_kinds(transport, own, result)
        return result

    def _all_kinds(self, transport: RecordedTransport, own: list[Any], result: Tensor) -> Tensor:
        """Return the integers that all ranks gather, if the first and the last rank of each kind pass the same ones.

        Else return `result`, of which only what the ranks sent that are run is known.
        """
        kinds: Kinds = transport.contents.kinds
        group, channel = kinds.group(self._channel.key), self._channel
        given = kinds.given[kinds.named(channel.key), channel.num_collectives]
        given[transport.rank] = own
        run = {kind: kinds.checked.get(kind, kind) for kind in group.kinds}
        transport.contents.wait_until(lambda: given.keys() >= {*run, *run.values()})
        if any(given[first] != given[last] for first, last in run.items()):
            return result
        every = chain.from_iterable(given[kind] for kind, _ in group.places.values())
        return torch.tensor(list(every), dtype=result.dtype)


@dataclass
class KindsRun(DryPrograms[T]):
    """The result of `run_kinds`: the programs are those of the first rank of each kind, the results those of all that ran.

    kinds        first rank of a kind -> all its ranks
    checked      first rank of a kind -> the last rank, whose record was compared; a kind of one rank has none
    collectives  each distinct collective call -> the messages that all its ranks send, or None if it was not run by itself
    messages     their number over all ranks
    """

    kinds: dict[int, list[int]]
    checked: dict[int, int]
    collectives: dict[Call, int | None]
    messages: int

    @property
    def num_messages(self) -> int:
        return self.messages


def run_kinds(mesh: Mesh, alike: Sequence[str], program: RankProgram[T]) -> KindsRun[T]:
    """Run the first and the last rank of each kind of a mesh, and conclude for all ranks, as this module explains.

    mesh   built from a number of ranks
    alike  the axes of (pp, dp, cp, tp) along which ranks are of one kind

    Raises Refused like `run_ranks`, and if the first and last rank of a kind do not have the same record.
    """
    kinds = Kinds(mesh, alike)
    done = record(mesh.world_size, [*kinds.ranks, *kinds.checked.values()], program, KindComm, kinds)
    recorded = {own.rank: own for own in done.programs}
    programs = {rank: kinds.program(own) for rank, own in recorded.items()}
    for first, last in kinds.checked.items():
        if apart := difference(programs[first], programs[last]):
            raise Refused(
                f"ranks {first} and {last} are not of one kind: {apart}; nothing follows for the ranks between them"
            )
    firsts = [programs[first] for first in kinds.ranks]
    faults = [*done.faults, *disagreements(firsts)]
    collectives: dict[Call, int | None] = {}
    messages = 0.0
    for first, ranks in kinds.ranks.items():
        messages += len(ranks) * sum(1 for _ in recorded[first].messages())
        for of in recorded[first].operations:
            if of.call and of.call not in collectives and of.call.size > 1:
                collectives[of.call] = None
                if of.call.size * of.num_sent <= MOST_MESSAGES:
                    alone: DryPrograms[None] = run_ranks(of.call.size, of.call.run)
                    collectives[of.call] = alone.num_messages
                    faults += [f"{of.call}: {fault}" for fault in alone.faults]
            if of.call in collectives:
                sent = collectives[of.call]
                messages += len(ranks) * (of.num_sent if sent is None else sent / of.call.size)
    return KindsRun(
        firsts,
        done.results,
        faults,
        done.assumed,
        dict(kinds.ranks),
        kinds.checked,
        collectives,
        round(messages),
    )
