"""Check that the programs of all ranks fit each other: prove that they end, or name the first disagreement.

`disagreements` takes the ranks' records (`record.py`), communicates nothing, and checks in this order:

    collectives   the members of a channel call the same collectives of the same shape in the same order
    channels      any two ranks make the channels that they share in the same order, which NCCL needs
    messages      the programs are executed against each other, once by the rules of each of the two transports below

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

from minipar.comm.transport.diagnosis import Line, MessageCounts, deadlock, unmatched_messages
from minipar.comm.transport.messages import ChannelId, Message, Posts
from minipar.extras.dry_run.record import Completed, Finished, Key, Make, Post, Program, Start, Step

MOST_SENTENCES = 8


def disagreements(programs: Sequence[Program]) -> list[str]:
    """Describe what does not fit, the most helpful sentence first; an empty list if every program runs to its end."""
    if found := _different_collectives(programs):
        # Skip the other checks: different collectives also send different messages, so they would repeat the finding.
        return found[:MOST_SENTENCES]
    found = _different_channels(programs) or Execution(programs, in_order=False).run()
    if not found:
        found = [f"with NCCL, {sentence}" for sentence in Execution(programs, in_order=True).run()]
    return found[:MOST_SENTENCES]


# Collectives and channels -------------------------------------------------------------------------------------------


def _collectives(program: Program) -> dict[ChannelId, list[str]]:
    """Return the collectives of each channel, described in words, in the order in which this rank starts them."""
    called: dict[ChannelId, list[str]] = defaultdict(list)
    for operation in program.operations:
        if operation.words:
            called[operation.channel].append(operation.words)
    return called


def _different_collectives(programs: Sequence[Program]) -> list[str]:
    """Name, for each channel, the first collective in which a member differs from most members."""
    called = {program.rank: _collectives(program) for program in programs}
    ended = {program.rank: program.ended for program in programs}
    found = []
    for channel in sorted({channel for calls in called.values() for channel in calls}):
        lists = {rank: called[rank][channel] for rank in channel.ranks if rank in called}
        for i in range(max(map(len, lists.values()))):
            # A program that was cut short says nothing about the collectives that it would have called later.
            here = {
                r: calls[i] if i < len(calls) else None
                for r, calls in lists.items()
                if i < len(calls) or ended[r]
            }
            if len(set(here.values())) <= 1:
                continue
            usual, _ = Counter(here.values()).most_common(1)[0]
            others = [r for r, call in here.items() if call != usual]
            like = next(r for r, call in here.items() if call == usual)
            said = "; ".join(f"rank {r} {_calls(here[r])}" for r in others[:3])
            found.append(f"collective {i + 1} on {channel}: {said}, and rank {like} {_calls(usual)}")
            break
    return found


def _calls(collective: str | None) -> str:
    return "calls no more" if collective is None else f"calls {collective}"


def _different_channels(programs: Sequence[Program]) -> list[str]:
    """Name the first pair of ranks that make the channels they share in different orders."""
    made = {
        program.rank: [step.channel for step in program.steps() if isinstance(step, Make)]
        for program in programs
    }
    cut = {program.rank for program in programs if not program.ended}
    for (a, made_by_a), (b, made_by_b) in combinations(sorted(made.items()), 2):
        of_a = [channel for channel in made_by_a if b in channel.ranks]
        of_b = [channel for channel in made_by_b if a in channel.ranks]
        if {a, b} & cut:
            of_a, of_b = of_a[: len(of_b)], of_b[: len(of_a)]
        for i, (x, y) in enumerate(zip_longest(of_a, of_b, fillvalue="none"), start=1):
            if x != y:
                return [
                    f"rank {a} and rank {b} make the groups they share in different orders: group {i} is {x} on "
                    f"rank {a} and {y} on rank {b}; NCCL would hang"
                ]
    return []


# Execution ----------------------------------------------------------------------------------------------------------

# A message's posted halves, by verb: "send" and "receive". It is delivered once there are both.
Halves = dict[str, Message]
# A rank's main program, or an operation of one of its streams; yields the message or operation that it has to wait for.
Thread = Iterator[object]


@dataclass
class RankState:
    """A rank's progress through its operations.

    queues  channel -> the operations given to its stream that have not ended, the running one first
    posts   number of a post -> the keys of its messages
    """

    program: Program
    queues: dict[ChannelId, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    finished: set[int] = field(default_factory=set)
    posts: dict[int, list[Key]] = field(default_factory=dict)
    numbers: Counter[tuple[ChannelId, str, str, int]] = field(default_factory=Counter)
    sent: dict[Line, Posts] = field(default_factory=dict)
    received: dict[Line, Posts] = field(default_factory=dict)


class Execution:
    """Executes the programs of all ranks against each other.

    in_order  True: the rules of the grouped transport; False: those of the tagged one
    """

    def __init__(self, programs: Iterable[Program], in_order: bool):
        self.in_order = in_order
        self.ranks = {program.rank: RankState(program) for program in programs}
        self.halves: dict[Key, Halves] = defaultdict(dict)
        # Message key, or (rank, operation) -> the threads that wait for it.
        self.waiting: dict[object, list[Thread]] = defaultdict(list)
        self.ready: deque[Thread] = deque()
        self.running: set[int] = set()  # ranks whose main program has not ended
        self.mismatched: list[str] = []

    def run(self) -> list[str]:
        """Execute as far as possible; return sentences that say why the ranks that have not ended cannot go on."""
        self.running.update(self.ranks)
        self.ready.extend(map(self._main, self.ranks.values()))
        while self.ready:
            thread = self.ready.popleft()
            if (waits_for := next(thread, None)) is not None:
                self.waiting[waits_for].append(thread)
        return [*self.mismatched, *self._explanations()]

    def _main(self, state: RankState) -> Thread:
        yield from self._execute(state, state.program.main)
        self.running.discard(state.program.rank)

    def _operation(self, state: RankState, number: int) -> Thread:
        operation = state.program.operations[number]
        yield from self._execute(state, operation.steps)
        queue = state.queues[operation.channel]
        queue.popleft()
        state.finished.add(number)
        self._wake((state.program.rank, number))
        if queue:
            self.ready.append(self._operation(state, queue[0]))

    def _execute(self, state: RankState, steps: Sequence[Step]) -> Thread:
        rank = state.program.rank
        for step in steps:
            if isinstance(step, Start):
                queue = state.queues[state.program.operations[step.operation].channel]
                queue.append(step.operation)
                if len(queue) == 1:
                    self.ready.append(self._operation(state, step.operation))
            elif isinstance(step, Finished):
                while step.operation not in state.finished:
                    yield rank, step.operation
            elif isinstance(step, Post):
                self._post(rank, state, step)
                if self.in_order:
                    yield from self._deliver(state, step.number)
            elif isinstance(step, Completed):
                yield from self._deliver(state, step.post)

    def _deliver(self, state: RankState, post: int) -> Thread:
        for key in state.posts[post]:
            while len(self.halves[key]) < 2:
                yield key

    def _post(self, rank: int, state: RankState, post: Post) -> None:
        posted = []
        for message in (post.send, post.receive):
            if message is None:
                continue
            sends = message.verb == "send"
            lane = "" if self.in_order else message.lane  # the grouped transport has none
            count = (message.channel, lane, message.verb, message.peer)
            pair = (rank, message.peer) if sends else (message.peer, rank)
            key = (message.channel, lane, *pair, state.numbers[count])
            state.numbers[count] += 1
            table = state.sent if sends else state.received
            line = message.channel, message.lane, message.peer
            table[line] = (message.number + 1, message.num_bytes, message.label)
            halves = self.halves[key]
            halves[message.verb] = message
            posted.append(key)
            if len(halves) == 2:
                self._meet(key, halves)
        state.posts[post.number] = posted

    def _meet(self, key: Key, halves: Halves) -> None:
        """Compare a send with its receive, and let the threads that wait for the message go on."""
        send, receive = halves["send"], halves["receive"]
        if (send.num_bytes, send.label) != (receive.num_bytes, receive.label):
            self.mismatched.append(
                f"rank {key[2]} sends rank {key[3]} {send.num_bytes} bytes on {send.channel} ({send.label}, message "
                f"{send.number}), and rank {key[3]} receives {receive.num_bytes} bytes ({receive.label})"
            )
        self._wake(key)

    def _wake(self, key: object) -> None:
        self.ready.extend(self.waiting.pop(key, ()))

    def _explanations(self) -> list[str]:
        """Explain, from the message counts, why programs cannot end, as is done for a run that hangs.

        If the counts prove no deadlock, say what each waiting rank waits for.
        """
        waits: dict[int, list[Message]] = defaultdict(list)
        for key, halves in self.halves.items():
            for message in halves.values() if key in self.waiting else ():  # one: of the rank that waits
                waits[key[2] if message.verb == "send" else key[3]].append(message)
        counts = {
            rank: MessageCounts(list(waits[rank]), state.sent, state.received)
            for rank, state in self.ranks.items()
        }
        found = []
        if self.running:
            why = deadlock(counts, set(self.running), set(self.ranks) - self.running)
            found = [sentence for _, sentence in sorted((why or {}).items())]
            if not found:
                found = [
                    f"rank {rank} waits to {waits[rank][0]}" for rank in sorted(self.running) if waits[rank]
                ] or [f"ranks {sorted(self.running)} wait for each other's operations"]
        left = unmatched_messages(counts)
        return found or [unmatched.sentence for unmatched in left]
