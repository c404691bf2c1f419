"""A dry run by symmetry: one rank of each kind is run for all of its kind, and one more to check that they are alike.

Ranks are of one kind if they differ only along axes that are said to be alike (dp and tp, for the trainer). Their records
are written in words that are equal for all of a kind:

    a channel     its name, and the kinds of its members
    a message     the kind of its peer, and by how many places the peer stands after this rank, among the group's members
                  of that kind
    a collective  one step; its own messages are proven apart

If all ranks of a kind have the same record, then the ranks of a mesh can be taken to run in lockstep, and one rank of
each kind, executed against the others (`transport/matching.py`), stands for all: a send by d places meets the receive from
d places before. A collective is executed as if nobody left before all have come. A real one waits for fewer, so what ends
here ends there.

That all have the same record is computed for the first and the last rank of each kind, and assumed of those between: a
fault of one of these alone is not seen.

Each distinct collective is run by itself: by all ranks of its group, or, if its first two ranks and its last one have the
same record, by those.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Generic, Literal, NamedTuple

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.ring import gathered_sizes
from minipar.mesh import Mesh
from minipar.support.chunks import check_sizes
from minipar.transport.checked import OF_ONE_SHAPE
from minipar.transport.dry import (
    Contents,
    Make,
    Post,
    Program,
    Recorded,
    RecordedMessages,
    RecordedTransport,
    Refused,
    Start,
    Step,
)
from minipar.transport.matching import disagreements
from minipar.transport.messages import Channel, ChannelId, Message
from minipar.transport.traffic import Traffic
from minipar.verification.dry_programs import DryPrograms, RankProgram, T, record, run_ranks
from minipar.verification.dry_tensors import DryTensors

ALIKE = ("dp", "tp")  # along these axes, every rank of the trainer runs one program
FEW = 4  # groups of at most so many ranks are run whole
MOST_STEPS = 200_000
OVER_RANKS = {"sum": "sum", "max": "amax", "min": "amin"}  # torch's names

# Rank -> the first rank of its kind.
KindOf = Callable[[int], int]


# Groups -------------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """A channel in words that are equal for all ranks of a kind.

    channel  its name, and the kinds of its members
    places   position in the channel -> its kind, and its place among the members of that kind
    of_each  number of members of each kind; 0 if the kinds have different numbers
    """

    channel: ChannelId
    places: list[tuple[int, int]]
    of_each: int


def group_of(key: ChannelId, kind_of: KindOf) -> Group:
    met: Counter[int] = Counter()
    places = []
    for rank in key.ranks:
        kind = kind_of(rank)
        places.append((kind, met[kind]))
        met[kind] += 1
    counts = set(met.values())
    return Group(ChannelId(key.name, tuple(sorted(met))), places, counts.pop() if len(counts) == 1 else 0)


# Collectives --------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A collective, as all its ranks call it.

    size    number of ranks          default  what "auto" stands for, or None
    shape   the tensor's shape; an all-gather's with given sizes has none of its first dim
    """

    kind: str
    algorithm: str
    default: str | None
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str | None
    root: int | None
    sizes: tuple[int, ...] | None

    def run(self, comm: Comm, tensors: DryTensors) -> None:
        """Call this collective as a rank of `comm`."""
        shape = self.shape
        given: dict[str, Any] = {}
        if self.op is not None:
            given["op"] = self.op
        if self.root is not None:
            given["root"] = self.root
        if self.kind == "all_to_all":
            assert self.sizes is not None
            given |= {"send_sizes": self.sizes, "recv_sizes": [self.sizes[comm.rank]] * comm.size}
        elif self.sizes is not None:
            given["sizes"] = self.sizes
            shape = (self.sizes[comm.rank], *shape) if self.kind == "all_gather" else shape
        x = torch.empty(shape, dtype=self.dtype)
        if not x.is_meta:
            tensors.forget_contents(x)
        comm = comm.using(self.default) if self.default else comm
        comm._collective(self.kind, self.algorithm, False, x, **given)


def call_of(comm: Comm, kind: str, algorithm: str, x: Tensor, given: dict[str, Any]) -> Call:
    """Describe a collective. Raises Refused if it cannot be said what the other ranks of the group call."""
    shape, sizes = tuple(x.shape), given.get("sizes")
    if kind == "all_gather" and sizes is not None:
        sizes, shape = gathered_sizes(comm, x, sizes), shape[1:]
    if kind == "all_to_all":
        sizes = check_sizes(given.get("send_sizes"), x.shape[0], comm.size, "send_sizes")
        back = given.get("recv_sizes")
        if back is not None and list(back) != [sizes[comm.rank]] * comm.size:
            raise Refused(
                f"an all-to-all on comm {comm.name!r} sends {list(sizes)} rows and receives {list(back)}: its ranks send "
                "different numbers of rows, and are not of one kind; run every rank"
            )
    return Call(
        kind,
        algorithm,
        comm.default_algorithm,
        comm.size,
        shape,
        x.dtype,
        given.get("op"),
        given.get("root"),
        None if sizes is None else tuple(int(s) for s in sizes),
    )


class Proven(NamedTuple):
    """A collective, run by itself: what is wrong, and the messages and bytes that all its ranks send together.

    how   "whole", by all its ranks; "alike", by three ranks with one record; "smaller", by fewer ranks than it has
    """

    faults: list[str]
    messages: int
    sent_bytes: int
    how: Literal["whole", "alike", "smaller"]


def prove(call: Call) -> Proven:
    """Run a collective by itself, by its first two ranks and the last one if they are alike, else by all.

    If all were more than MOST_STEPS steps, it is run by a group of fewer ranks.
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
    """Return the same collective of fewer ranks: a power of two if their number is one, else none."""
    fewer = 32 if call.size & (call.size - 1) == 0 else 24
    sizes = call.sizes and tuple(call.sizes[i * call.size // fewer] for i in range(fewer))
    rows = call.shape[0] if call.shape else 0
    if sizes is not None and call.kind in ("reduce_scatter", "all_to_all"):
        rows = sum(sizes)
    shape = call.shape if sizes is None or call.kind == "all_gather" else (rows, *call.shape[1:])
    return call._replace(
        size=fewer, sizes=sizes, shape=shape, root=call.root and call.root * fewer // call.size
    )


# A rank's record ----------------------------------------------------------------------------------------------------


class Effect(NamedTuple):
    """What a collective did to its rank, so that an equal one need not be run again.

    booked  (Traffic, kind) -> bytes, messages
    above   how many more bytes were alive at its worst moment than before it
    result  shape, strides, dtype of a new tensor; None if the result is the caller's `out`, or nothing
    """

    booked: dict[tuple[int, str], tuple[Traffic, int, int]]
    above: int
    result: tuple[torch.Size, tuple[int, ...], torch.dtype] | None


class KindTransport(RecordedTransport):
    """The transport of a rank that stands for its kind.

    called         each collective, with its channel, in the order in which it began
    contents_sent  the whole numbers of each message, with its channel: ranks of a kind must send the same
    own_sent       number and bytes of the messages that belong to no collective
    sent_in        collective -> number and bytes of the messages that this rank sent in it
    """

    def __init__(self, worlds: Worlds, rank: int, contents: Contents, tensors: DryTensors):
        super().__init__(worlds.members, rank, contents, tensors.has_contents, tensors.forget_contents)
        self.tensors, self.kind_of = tensors, worlds.kind_of
        self._in_kinds, self._given, self._checked = worlds.groups, worlds.given, worlds.checked
        self.program = Program(worlds.kind_of(rank))
        self.called: list[tuple[ChannelId, Call]] = []
        self.contents_sent: list[tuple[object, ...]] = []
        self.own_sent = [0, 0]
        self.sent_in: dict[Call, list[int]] = defaultdict(lambda: [0, 0])
        self._call: Call | None = None
        self._named: dict[ChannelId, ChannelId] = {}
        self._own_place: dict[ChannelId, int] = {}
        self._inside_collective = False
        self._booked: dict[tuple[int, str], tuple[Traffic, int, int]] = {}
        self._effects: dict[object, Effect] = {}
        self._waited: Counter[tuple[ChannelId, str, int]] = Counter()

    def in_kinds(self, key: ChannelId) -> Group:
        if key not in self._in_kinds:
            self._in_kinds[key] = group_of(key, self.kind_of)
        return self._in_kinds[key]

    def named(self, key: ChannelId) -> ChannelId:
        """Return the channel's identity in this rank's record; a second channel with its name and kinds is numbered."""
        if key not in self._named:
            channel = self.in_kinds(key).channel
            number = sum(known.name.split(" #")[0] == channel.name and known.ranks == channel.ranks
                         for known in self._named.values())  # fmt: skip
            self._named[key] = channel._replace(name=f"{channel.name} #{number + 1}") if number else channel
        return self._named[key]

    def make_stream(self, key: ChannelId) -> Any:
        return super().make_stream(self.named(key))

    def record(self, step: Step) -> None:
        super().record(Make(self.named(step.channel)) if isinstance(step, Make) else step)

    def note(self, channel: Channel, verb: str, num_bytes: int, peer: int, label: str) -> Message:
        message = super().note(channel, verb, num_bytes, peer, label)
        group, named = self.in_kinds(channel.key), self.named(channel.key)
        if not group.of_each:
            raise Refused(
                f"{channel.key} has different numbers of ranks of each kind: {message} has no counterpart by symmetry; "
                "run every rank"
            )
        if channel.key not in self._own_place:
            _, self._own_place[channel.key] = group.places[channel.key.ranks.index(self.rank)]
        place = self._own_place[channel.key]
        of_peer, place_of_peer = group.places[peer]
        by = place_of_peer - place if verb == "send" else place - place_of_peer
        name = f"{named.name}, {by % group.of_each} places on" if by % group.of_each else named.name
        return message._replace(peer=of_peer, channel=ChannelId(name, named.ranks))

    def post(
        self, channel: Channel, kind: str, x: Tensor | None, to: int | None, out: Tensor | None, source: int | None,
        traffic: Traffic,
    ) -> Any:  # fmt: skip
        sends = to is not None and x is not None and x.numel()
        if self._inside_collective:
            if sends:
                assert x is not None
                self._book(traffic, channel.kind or kind, x.nbytes, 1)
            if out is not None and not out.is_meta:
                self.on_unknown(out)
            return RecordedMessages(self, -1, None, out)
        if sends:
            assert x is not None
            self.own_sent[0] += 1
            self.own_sent[1] += x.nbytes
            if self.has_contents(x):
                self.contents_sent.append((self.named(channel.key), *x.detach().reshape(-1).tolist()))
        return super().post(channel, kind, x, to, out, source, traffic)

    def _book(self, traffic: Traffic, kind: str, num_bytes: int, messages: int) -> None:
        traffic.book(kind, num_bytes, messages)
        self._count(num_bytes, messages)
        key = (id(traffic), kind)
        _, bytes_before, messages_before = self._booked.get(key, (traffic, 0, 0))
        self._booked[key] = traffic, bytes_before + num_bytes, messages_before + messages

    def _count(self, num_bytes: int, messages: int) -> None:
        if self._call is not None:
            self.sent_in[self._call][0] += messages
            self.sent_in[self._call][1] += num_bytes

    # Collectives

    def collective(
        self, channel: Channel, call: Call, x: Tensor, out: Tensor | None, run: Callable[[], Any]
    ) -> Any:
        """Run a collective as one step of the record: a wait for all kinds of its group."""
        if self._inside_collective:
            return run()
        self.called.append((self.named(channel.key), call))
        self._wait_for_all(channel, call)
        self._call = call
        if self.has_contents(x) and call.size > 1:
            return self._of_whole_numbers(channel, call, x, out, run)
        if not x.is_meta or not (out is None or out.is_meta):
            return self._run(run)
        scratch = tuple((use, view.numel(), view.dtype) for use, view in channel._views.items())
        key = channel.key, call, scratch, x.shape, x.stride(), x.storage_offset() == 0, out is None
        if key in self._effects:
            return self._again(self._effects[key], out)
        before, peak = self.tensors.now, self.tensors.peak
        self.tensors.peak, self._booked = before, {}
        result = self._run(run)
        above, booked = self.tensors.peak - before, self._booked
        self._booked = {}
        self.tensors.peak = max(peak, self.tensors.peak)
        same = scratch == tuple((use, view.numel(), view.dtype) for use, view in channel._views.items())
        fresh = isinstance(result, Tensor) and result.untyped_storage()._cdata != x.untyped_storage()._cdata
        if same and (result is None or out is not None or fresh):
            made = (
                (result.shape, result.stride(), result.dtype) if out is None and result is not None else None
            )
            self._effects[key] = Effect(booked, above, made)
        return result

    def _of_whole_numbers(
        self, channel: Channel, call: Call, x: Tensor, out: Tensor | None, run: Callable[[], Any]
    ) -> Tensor:
        """Return what a collective returns if all of a kind give what its first gives; unknown if its last differs."""
        if call.kind not in ("all_gather", "all_reduce") or call.op == "mean" or out is not None:
            raise Refused(
                f"{call.kind} on comm {channel.key.name!r} computes with whole numbers, of which each rank may have its "
                "own; run a smaller mesh, with every rank"
            )
        named, kinds = self.named(channel.key), self.in_kinds(channel.key).channel.ranks
        given = self._given.setdefault((named, sum(channel == named for channel, _ in self.called)), {})
        given[self.rank] = x.detach().tolist()  # a list, because a tensor would count as this rank's memory
        wanted = {rank for kind in kinds for rank in (kind, self._checked.get(kind, kind))}
        self.contents.wait_until(lambda: wanted <= given.keys())
        result: Tensor = self._run(run)
        if all(given[kind] == given[self._checked.get(kind, kind)] for kind in kinds):
            every = [given[kind] for kind, _ in self.in_kinds(channel.key).places]
            if call.kind == "all_gather":
                return torch.tensor(list(chain.from_iterable(every)), dtype=x.dtype)
            stacked = torch.tensor(every, dtype=x.dtype)
            over_ranks: Tensor = getattr(stacked, OVER_RANKS[call.op or "sum"])(0)
            return over_ranks.to(x.dtype)
        self.on_unknown(result)
        return result

    def _again(self, effect: Effect, out: Tensor | None) -> Tensor | None:
        for (_, kind), (traffic, num_bytes, messages) in effect.booked.items():
            traffic.book(kind, num_bytes, messages)
            self._count(num_bytes, messages)
        self.tensors.peak = max(self.tensors.peak, self.tensors.now + effect.above)
        if effect.result is None:
            return out
        shape, strides, dtype = effect.result
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    def _run(self, run: Callable[[], Any]) -> Any:
        """Run a collective's algorithm without recording its messages."""
        recording, num_operations = self.recording, len(self.program.operations)
        self.recording, self._inside_collective = False, True
        try:
            return run()
        finally:
            self.recording, self._inside_collective = recording, False
            del self.program.operations[num_operations:]

    def _wait_for_all(self, channel: Channel, call: Call) -> None:
        """Record messages without bytes to and from every other kind in the group."""
        named, kinds = self.named(channel.key), self.in_kinds(channel.key).channel.ranks
        shape = f" of {list(call.shape)}" if call.kind in OF_ONE_SHAPE else ""
        label = " ".join(filter(None, (call.kind, call.op))) + shape
        at = kinds.index(self.program.rank)
        for distance in range(1, len(kinds)):
            halves = []
            for verb, kind in (("send", at + distance), ("receive", at - distance)):
                peer = kinds[kind % len(kinds)]
                number = self._waited[named, verb, peer]
                self._waited[named, verb, peer] += 1
                halves.append(Message(verb, peer, named, "collective", number, 0, label))
            self.record(Post(self.program.num_posts, *halves))
            self.program.num_posts += 1


class KindComm(Comm):
    """A Comm whose collectives are single steps of the record of a kind."""

    _call: tuple[Call, Tensor, Tensor | None] | None = None

    def _collective(self, kind: str, algorithm: str, async_op: bool, x: Tensor, **kwargs: Any) -> Any:
        self._call = call_of(self, kind, algorithm, x, kwargs), x, kwargs.get("out")
        return super()._collective(kind, algorithm, async_op, x, **kwargs)

    def _run(
        self, kind: str, signature: str, operation: Any, async_op: bool, shape: torch.Size | None = None
    ) -> Any:
        if shape is not None:  # it comes from `_collective`
            transport = self._transport
            assert isinstance(transport, KindTransport)
            assert self._call is not None
            operation = partial(transport.collective, self._channel, *self._call, operation)
            self._call = None  # it would keep the tensor alive
        return super()._run(kind, signature, operation, async_op, shape)


@dataclass
class Worlds:
    """Makes the worlds of ranks that stand for their kinds.

    comm_class  KindComm; or Comm, with which the messages of collectives are recorded, too
    checked     first rank of a kind -> the one that is compared with it, if there is another
    given       (channel, number of a collective) -> rank -> the whole numbers that it gave
    transports  rank -> its transport
    """

    members: tuple[int, ...]
    kind_of: KindOf
    comm_class: type[Comm]
    checked: dict[int, int] = field(default_factory=dict)
    given: dict[tuple[ChannelId, int], dict[int, list[Any]]] = field(default_factory=dict)
    groups: dict[ChannelId, Group] = field(default_factory=dict)
    transports: dict[int, KindTransport] = field(default_factory=dict)
    of_last: Contents | None = None

    def make(self, rank: int, contents: Contents, tensors: DryTensors) -> Comm:
        # The first ranks of all kinds send each other their whole numbers, and so do the last ones.
        if rank != self.kind_of(rank):
            self.of_last = contents = self.of_last or Contents(contents.wait_until)
        transport = KindTransport(self, rank, contents, tensors)
        self.transports[rank] = transport
        return self.comm_class(transport, self.members, "world")


# All kinds ----------------------------------------------------------------------------------------------------------


@dataclass
class KindsRun(Generic[T]):
    """What `run_kinds` found.

    programs     the record of the first rank of each kind
    results      rank -> its result, of the ranks that were run
    kinds        first rank of a kind -> all its ranks
    checked      first rank of a kind -> the rank whose record was compared with the first one's, if there is another
    collectives  each distinct one
    messages, sent_bytes   of all ranks
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
    """Run the first and the last rank of each kind of a mesh, and prove what follows for all: see this module.

    mesh   built from a number of ranks
    alike  the axes of (pp, dp, cp, tp) along which ranks are of one kind

    Raises Refused like `run_ranks`, and where the two ranks of a kind do not have the same record.
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
    faults += [f"{_words(call)}: {fault}" for call, found in proven.items() for fault in found.faults]
    messages, sent_bytes = _totals(worlds, kinds, proven)
    return KindsRun(
        programs, done.results, faults, done.assumed, dict(kinds), checked, proven, messages, sent_bytes
    )


def _first_of_kind(mesh: Mesh, rank: int, alike: Sequence[str]) -> int:
    """Return the rank whose coordinates along the axes `alike` are 0, and the others those of `rank`."""
    return rank - sum(rank // mesh.stride(axis) % mesh.sizes[axis] * mesh.stride(axis) for axis in alike)


def _require_alike(a: KindTransport, b: KindTransport) -> None:
    """Raise Refused if the first and the last rank of a kind do not have the same record."""
    found = difference(a.program, b.program)
    if not found and a.called != b.called:
        found = next(
            f"one calls {_words(x)}, the other {_words(y)}, on {channel}"
            for (channel, x), (_, y) in zip(a.called, b.called)
            if x != y
        )
    if not found and a.contents_sent != b.contents_sent:
        found = "they send different whole numbers"
    if found:
        raise Refused(
            f"ranks {a.rank} and {b.rank} are not of one kind: {found}; nothing follows for the ranks between them"
        )


def difference(first: Program, other: Program) -> str:
    """Return in words where the records of two ranks of a kind begin to differ; "" if they are equal."""
    for i in range(max(len(first.operations), len(other.operations))):
        calls = [_operation(x.operations[i]) if i < len(x.operations) else "nothing" for x in (first, other)]
        if calls[0] != calls[1]:
            return f"operation {i + 1} is {calls[0]} on one and {calls[1]} on the other"
    pairs = [(first.main, other.main)]
    pairs += [(a.steps, b.steps) for a, b in zip(first.operations, other.operations)]
    for of_first, of_other in pairs:
        for i in range(max(len(of_first), len(of_other))):
            steps = [steps[i] if i < len(steps) else None for steps in (of_first, of_other)]
            if steps[0] != steps[1]:
                return f"step {i + 1} is to {_step(steps[0])} on one and to {_step(steps[1])} on the other"
    return "one ended and the other did not" if first.ended != other.ended else ""


def _operation(operation: Recorded) -> str:
    one_shape = operation.signature.split(" ")[0] in OF_ONE_SHAPE and operation.shape is not None
    of = f" of {list(operation.shape or ())}" if one_shape else ""
    return f"{operation.signature or 'a message'}{of} on {operation.channel}"


def _step(step: Step | None) -> str:
    if isinstance(step, Post):
        return " and ".join(str(message) for message in (step.send, step.receive) if message is not None)
    if isinstance(step, Make):
        return f"make {step.channel}"
    return "do nothing" if step is None else "go on" if isinstance(step, Start) else "wait"


def _words(call: Call) -> str:
    op = f" {call.op}" if call.op else ""
    return f"{call.kind}{op} of {list(call.shape)} {str(call.dtype).removeprefix('torch.')} over {call.size} ranks"


def _totals(worlds: Worlds, kinds: dict[int, list[int]], proven: dict[Call, Proven]) -> tuple[int, int]:
    """Return number and bytes of all ranks' messages. A collective is counted by one kind of its group, for all of them."""
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
