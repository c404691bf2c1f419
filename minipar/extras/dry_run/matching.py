"""Check that the programs of all ranks fit each other: prove that they end, or name the first disagreement.

`disagreements` takes the ranks' records (`record.py`), communicates nothing, and checks in this order:

    collectives   the members of a channel call the same collectives of the same shape in the same order
    channels      any two ranks make the channels that they share in the same order, which NCCL needs
    messages      the programs are executed against each other, by the rules of the two transports below

In the execution a message is delivered once both its send and its receive have been posted, since a send has no buffer. If
a message is never delivered, the faults name the rank that waits for it and the rank that should have posted the other
half. A rank's steps do not depend on the ranks' speed, so if one execution ends, all do.

    tagged    matches a message by its operation and number; a message that is posted ahead does not block its channel
    grouped   matches messages by order alone, and completes a channel's posts one after another

Takes time in proportion to the number of messages.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from typing import Any

from minipar.comm.transport.diagnosis import Line, MessageCounts, Posted, deadlock, unmatched_messages
from minipar.comm.transport.messages import ChannelId, Message
from minipar.extras.dry_run.record import Make, Post, Program, Start, Step, Wait

MOST_SENTENCES = 8


def disagreements(programs: Sequence[Program]) -> list[str]:
    """Describe what does not fit, the most helpful sentence first; an empty list if every program runs to its end."""
    by_rank = {program.rank: program for program in programs}
    if found := _different_collectives(by_rank):
        # Skip the other checks: different collectives also send different messages, so they would repeat the finding.
        return found[:MOST_SENTENCES]
    found = _different_channels(by_rank)
    # What ends by the rules of the grouped transport ends by those of the tagged one, too, which forbid less.
    if not found and (of_grouped := Execution(programs, in_order=True).run()):
        of_tagged = Execution(programs, in_order=False).run()
        found = of_tagged or [f"with NCCL, {sentence}" for sentence in of_grouped]
    return found[:MOST_SENTENCES]


# Collectives and channels -------------------------------------------------------------------------------------------


def _first_difference(
    programs: dict[int, Program], lists: dict[int, list[Any]]
) -> tuple[int, dict[int, Any]] | None:
    """Return the first place, from 1, where ranks have different items, and these by rank: None for a list that has ended.

    A program that was cut short says nothing about what it would have done later.
    """
    for i, items in enumerate(zip_longest(*lists.values()), start=1):
        here = {rank: x for rank, x in zip(lists, items) if x is not None or programs[rank].ended}
        if len(set(here.values())) > 1:
            return i, here
    return None


def _different_collectives(programs: dict[int, Program]) -> list[str]:
    """Name, for each channel, the first collective in which a member differs from most members."""
    called: dict[ChannelId, dict[int, list[str]]] = {}
    for rank, program in programs.items():
        for operation in program.operations:
            if operation.words:
                members = [r for r in operation.channel.ranks if r in programs]
                lists = called.setdefault(operation.channel, {r: [] for r in members})
                lists[rank].append(operation.words)
    found = []
    for channel, lists in sorted(called.items()):
        if different := _first_difference(programs, lists):
            i, here = different
            (usual, _), *_ = Counter(here.values()).most_common(1)
            likes = {call: rank for rank, call in reversed(here.items())}
            said = [f"rank {rank} {_calls(call)}" for rank, call in here.items() if call != usual]
            found.append(
                f"collective {i} on {channel}: {'; '.join(said[:3])}, and rank {likes[usual]} {_calls(usual)}"
            )
    return found


def _calls(collective: str | None) -> str:
    return "calls no more" if collective is None else f"calls {collective}"


def _different_channels(programs: dict[int, Program]) -> list[str]:
    """Name the first pair of ranks that make the channels they share in different orders."""
    made = {
        rank: [step.channel for step in program.steps() if isinstance(step, Make)]
        for rank, program in programs.items()
    }
    for a, b in combinations(sorted(made), 2):
        shared = {rank: [channel for channel in made[rank] if {a, b} <= {*channel.ranks}] for rank in (a, b)}
        if different := _first_difference(programs, shared):
            i, here = different
            return [
                f"rank {a} and rank {b} make the groups they share in different orders: group {i} is {here[a]} on "
                f"rank {a} and {here[b]} on rank {b}; NCCL would hang"
            ]
    return []


# Execution ----------------------------------------------------------------------------------------------------------

# Identifies a message: channel, lane ("" in the grouped transport), sender, receiver, number.
Key = tuple[ChannelId, str, int, int, int]
# Executes steps. It yields what it has to wait for: a message's key, or (rank, operation).
Thread = Iterator[object]


@dataclass
class RankState:
    """A rank's progress through its operations.

    queues  channel -> the operations given to its stream that have not ended, the running one first
    posts   the keys of each post's messages
    """

    program: Program
    queues: dict[ChannelId, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    finished: set[int] = field(default_factory=set)
    posts: dict[Post, list[Key]] = field(default_factory=dict)
    numbers: Counter[tuple[ChannelId, str, str, int]] = field(default_factory=Counter)
    sent: dict[Line, Posted] = field(default_factory=dict)
    received: dict[Line, Posted] = field(default_factory=dict)


class Execution:
    """Executes the programs of all ranks against each other.

    in_order  True: the rules of the grouped transport; False: those of the tagged one
    """

    def __init__(self, programs: Iterable[Program], in_order: bool):
        self.in_order = in_order
        self.ranks = {program.rank: RankState(program) for program in programs}
        # The posted halves of each message, by verb. It is delivered once there are both.
        self.halves: dict[Key, dict[str, Message]] = defaultdict(dict)
        self.waiting: dict[object, list[Thread]] = defaultdict(list)
        self.ready: deque[Thread] = deque()
        self.running = set(self.ranks)  # ranks whose main program has not ended
        self.mismatched: list[str] = []

    def run(self) -> list[str]:
        """Execute as far as possible; return sentences that say why the ranks that have not ended cannot go on."""
        self.ready.extend(self._main(rank, state) for rank, state in self.ranks.items())
        while self.ready:
            thread = self.ready.popleft()
            for waits_for in thread:
                self.waiting[waits_for].append(thread)
                break
        return [*self.mismatched, *self._explanations()]

    def _main(self, rank: int, state: RankState) -> Thread:
        yield from self._steps(rank, state, state.program.main)
        self.running.discard(rank)

    def _stream(self, rank: int, state: RankState, queue: deque[int]) -> Thread:
        """Execute the operations of a stream until there are none."""
        while queue:
            yield from self._steps(rank, state, state.program.operations[queue[0]].steps)
            operation = queue.popleft()
            state.finished.add(operation)
            self._wake((rank, operation))

    def _steps(self, rank: int, state: RankState, steps: Iterable[Step]) -> Thread:
        for step in steps:
            if isinstance(step, Start):
                queue = state.queues[state.program.operations[step.operation].channel]
                queue.append(step.operation)
                if len(queue) == 1:
                    self.ready.append(self._stream(rank, state, queue))
            elif isinstance(step, Post):
                state.posts[step] = [self._post(rank, state, half) for half in step if half]
            post = step.on if isinstance(step, Wait) else step if self.in_order else None
            if isinstance(post, Post):
                for key in state.posts[post]:
                    if len(self.halves[key]) < 2:
                        yield key
            elif isinstance(step, Wait) and step.on not in state.finished:
                yield rank, step.on

    def _post(self, rank: int, state: RankState, message: Message) -> Key:
        """Post a half of a message. If the other half is there, compare them, and let go on who waits for the message."""
        sends = message.verb == "send"
        lane = "" if self.in_order else message.lane
        count = (message.channel, lane, message.verb, message.peer)
        pair = (rank, message.peer) if sends else (message.peer, rank)
        key = (message.channel, lane, *pair, state.numbers[count])
        state.numbers[count] += 1
        line = message.channel, message.lane, message.peer
        (state.sent if sends else state.received)[line] = (
            message.number + 1,
            message.num_bytes,
            message.label,
        )
        halves = self.halves[key]
        halves[message.verb] = message
        if len(halves) == 2:
            send, receive = halves["send"], halves["receive"]
            if (send.num_bytes, send.label) != (receive.num_bytes, receive.label):
                self.mismatched.append(
                    f"rank {pair[0]} sends rank {pair[1]} {send.num_bytes} bytes on {send.channel} ({send.label}, message "
                    f"{send.number}), and rank {pair[1]} receives {receive.num_bytes} bytes ({receive.label})"
                )
            self._wake(key)
        return key

    def _wake(self, key: object) -> None:
        self.ready.extend(self.waiting.pop(key, ()))

    def _explanations(self) -> list[str]:
        """Explain, from the message counts, why programs cannot end, as is done for a run that hangs.

        If the counts prove no deadlock, say what each waiting rank waits for.
        """
        waits: dict[int, list[object]] = defaultdict(list)
        for key, halves in self.halves.items():
            if key in self.waiting:
                for half in halves.values():
                    waits[key[2] if half.verb == "send" else key[3]].append(half)
        counts = {
            rank: MessageCounts(waits[rank], state.sent, state.received) for rank, state in self.ranks.items()
        }
        if not self.running:
            return [unmatched.sentence for unmatched in unmatched_messages(counts)]
        why = deadlock(counts, set(self.running), set(self.ranks) - self.running) or {}
        return (
            [sentence for _, sentence in sorted(why.items())]
            or [f"rank {rank} waits to {waits[rank][0]}" for rank in sorted(self.running) if waits[rank]]
            or [f"ranks {sorted(self.running)} wait for each other's operations"]
        )
