"""The transport of a rank that is run in place of its kind. Its records are equal for all ranks of the kind.

It records

a channel     as its name and the kinds of its members
a message     as the kind of the peer, and an offset: number the group's members of each kind from 0; the offset is the
              receiver's number minus the sender's
a collective  as one step; its own messages are checked separately (`prove.py`)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.transport.messages import Channel, ChannelId, Message
from minipar.comm.transport.traffic import Traffic
from minipar.extras.dry_run.call import Call, call_of
from minipar.extras.dry_run.record import Make, Post, Program, Refused, Step, in_words
from minipar.extras.dry_run.tensors import DryTensors
from minipar.extras.dry_run.transport import Contents, RecordedMessages, RecordedTransport

OVER_RANKS = {"sum": "sum", "max": "amax", "min": "amin"}  # reduction -> name of the Tensor method

# (id of a Traffic, kind of operation) -> the Traffic, bytes, messages
Booked = dict[tuple[int, str], tuple[Traffic, int, int]]
# Rank -> the first rank of its kind.
KindOf = Callable[[int], int]


class Group(NamedTuple):
    """A channel, described in terms that are equal for all ranks of a kind.

    channel  its name and the kinds of its members
    places   position in the channel -> the member's kind, and its index among the members of that kind
    of_each  number of members of each kind; 0 if the kinds have different numbers of members
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


class Effect(NamedTuple):
    """The effect of a collective on its rank, kept so that an equal collective need not be run again.

    booked  the bytes and messages that it sent
    above   the bytes by which the peak during the collective exceeded the memory before it
    result  shape, strides and dtype of the new tensor; None if the result is the caller's `out`, or None
    """

    booked: Booked
    above: int
    result: tuple[torch.Size, tuple[int, ...], torch.dtype] | None


class KindTransport(RecordedTransport):
    """The transport of a rank that is run in place of its kind.

    called         (channel, collective), in the order of the calls
    contents_sent  (channel, integers) of each message of integers; ranks of a kind must send the same integers
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
        self._booked: Booked = {}
        self._effects: dict[object, Effect] = {}
        self._waited: Counter[tuple[ChannelId, str, int]] = Counter()

    def in_kinds(self, key: ChannelId) -> Group:
        if key not in self._in_kinds:
            self._in_kinds[key] = group_of(key, self.kind_of)
        return self._in_kinds[key]

    def named(self, key: ChannelId) -> ChannelId:
        """Return the channel's identity in this rank's record: its name and kinds.

        A number is appended if this rank has an earlier channel with the same name and kinds.
        """
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
        """Run a collective, and record it as one step: the rank waits for a rank of every other kind in the group."""
        if self._inside_collective:
            return run()
        self.called.append((self.named(channel.key), call))
        self._wait_for_all(channel, call)
        self._call = call
        if self.has_contents(x) and call.size > 1:
            return self._of_whole_numbers(channel, call, x, out, run)
        if not x.is_meta or not (out is None or out.is_meta):
            return self._run(run)
        scratch = _scratch(channel)
        key = channel.key, call, scratch, x.shape, x.stride(), x.storage_offset() == 0, out is None
        if key in self._effects:
            return self._again(self._effects[key], out)
        result, booked, above = self._measured(run)
        made = None
        if out is None and result is not None:
            made = result.shape, result.stride(), result.dtype
        returns_x = made is not None and result.untyped_storage()._cdata == x.untyped_storage()._cdata
        if _scratch(channel) == scratch and not returns_x:
            self._effects[key] = Effect(booked, above, made)
        return result

    def _measured(self, run: Callable[[], Any]) -> tuple[Any, Booked, int]:
        """Run a collective; return its result, the traffic it booked, and the bytes it needed above those alive before."""
        before, peak = self.tensors.now, self.tensors.peak
        self.tensors.peak, self._booked = before, {}
        result = self._run(run)
        above, booked = self.tensors.peak - before, self._booked
        self.tensors.peak, self._booked = max(peak, self.tensors.peak), {}
        return result, booked, above

    def _of_whole_numbers(
        self, channel: Channel, call: Call, x: Tensor, out: Tensor | None, run: Callable[[], Any]
    ) -> Tensor:
        """Return the result of a collective of integers, taking the input of each kind's first rank for all its ranks.

        If the last rank of a kind has other integers, the contents of the result are unknown.
        """
        if call.kind not in ("all_gather", "all_reduce") or call.op == "mean" or out is not None:
            raise Refused(
                f"{call.kind} on comm {channel.key.name!r} computes with whole numbers, of which each rank may have its "
                "own; run a smaller mesh, with every rank"
            )
        named, kinds = self.named(channel.key), self.in_kinds(channel.key).channel.ranks
        given = self._given.setdefault((named, sum(channel == named for channel, _ in self.called)), {})
        given[self.rank] = x.detach().tolist()  # a list: a tensor would be counted as memory of this rank
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
        """Record an empty message to and from every other kind in the group."""
        named, kinds = self.named(channel.key), self.in_kinds(channel.key).channel.ranks
        label = in_words(" ".join(filter(None, (call.kind, call.op))), call.shape)
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


def _scratch(channel: Channel) -> tuple[tuple[str, int, torch.dtype], ...]:
    """Describe the scratch buffers of a channel, since a collective allocates more where they are too small."""
    return tuple((use, view.numel(), view.dtype) for use, view in channel._views.items())


class KindComm(Comm):
    """A Comm that records each collective as a single step of its rank's program."""

    _call: tuple[Call, Tensor, Tensor | None] | None = None

    def _collective(self, kind: str, algorithm: str, async_op: bool, x: Tensor, **kwargs: Any) -> Any:
        self._call = call_of(self, kind, algorithm, x, kwargs), x, kwargs.get("out")
        return super()._collective(kind, algorithm, async_op, x, **kwargs)

    def _run(
        self, kind: str, signature: str, operation: Any, async_op: bool, shape: torch.Size | None = None
    ) -> Any:
        if shape is not None:  # the caller is `_collective`; all other callers pass no shape
            transport = self._transport
            assert isinstance(transport, KindTransport)
            assert self._call is not None
            operation = partial(transport.collective, self._channel, *self._call, operation)
            self._call = None  # so that the tensor can be freed
        return super()._run(kind, signature, operation, async_op, shape)


@dataclass
class Worlds:
    """Makes the world Comm of each rank that is run in place of its kind.

    comm_class  KindComm; or Comm, which also records the messages of collectives
    checked     first rank of a kind -> the rank that is compared with it; a kind of one rank has none
    given       (channel, number of a collective) -> rank -> the integers that it passed
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
        # Messages of integers are delivered between the first ranks of the kinds, and separately between the last ranks.
        if rank != self.kind_of(rank):
            self.of_last = contents = self.of_last or Contents(contents.wait_until)
        transport = KindTransport(self, rank, contents, tensors)
        self.transports[rank] = transport
        return self.comm_class(transport, self.members, "world")
