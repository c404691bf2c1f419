"""A simulated network with a clock: ranks are coroutines, and messages and computations take simulated time.

A message takes alpha + bytes * beta. A rank's network card sends one message at a time, while the program goes on, and
receives one at a time. A message on its way occupies no memory on either side. A rank runs one computation at a time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minipar.learn.puzzles.values import Fault, Memory, Value, join

PROGRAM = "<program>"  # the file name under which a learner's source is compiled
MOST_MESSAGES = 500  # limit per rank; the answers send at most 80
MOST_AWAITS = 20_000  # limit for all ranks together

Steps = Generator[Any, Any, Any]


class Network(NamedTuple):
    """The time that a message takes, and which ranks may send to which."""

    alpha_s: float = 10e-6  # per message
    beta_s: float = 1 / 50e9  # per byte: 50 GB/s
    is_ring: bool = False  # True: a rank may send only to the next rank
    node_size: int | None = None  # ranks per node; None: all messages are equally fast
    node_speedup: int = 1  # messages inside a node are this many times as fast

    def seconds(self, num_bytes: int, sender: int, to: int) -> float:
        """Return the time of a message: alpha + bytes * beta, divided by `node_speedup` inside a node."""
        slow = self.alpha_s + num_bytes * self.beta_s
        inside = self.node_size is not None and sender // self.node_size == to // self.node_size
        return slow / self.node_speedup if inside else slow

    def described(self) -> str:
        """Say in a sentence how long a message takes."""
        if not self.alpha_s and not self.beta_s:
            return "Messages take no time."
        price = f"alpha = {self.alpha_s * 1e6:g} us, and beta = {self.beta_s * 1e12:g} ps for each byte"
        inside = f"; inside a node {self.node_speedup} times less" if self.node_size else ""
        return f"A message takes {price}{inside}."


class Call:
    """The result of a method of `comm`. The method runs when this is awaited; `world` records calls never awaited."""

    def __init__(self, world: World, rank: int, name: str, steps: Callable[[], Steps]) -> None:
        self._world, self._rank, self._name, self._steps = world, rank, name, steps
        self._line, self._awaited = world.line, False

    def __await__(self) -> Steps:
        self._awaited = True
        return self._steps()

    def __del__(self) -> None:
        if not self._awaited:
            self._world.forgotten.append((self._rank, self._name, self._line))


@dataclass
class Task:
    """A coroutine of a rank: its program, or one started by `comm.start`. Awaiting it returns the coroutine's result."""

    world: World
    coroutine: Coroutine[Any, Any, Any]
    rank: int
    line: int | None
    is_done: bool = False
    result: Any = None
    waits: Request | None = None
    waiters: list[Task] = field(default_factory=list)

    def __await__(self) -> Steps:
        return (yield Request("await", self.world.line or self.line, task=self))


@dataclass
class Request:
    """An operation that a coroutine asks the world to do; `kind` is send, recv, compute or await."""

    kind: str
    line: int | None
    value: Value | None = None
    peer: int = 0
    tag: object = None
    seconds: float = 0.0
    label: tuple[str, object] = ("C", "")
    task: Task | None = None


class CollectiveTag(NamedTuple):
    """The tag of a collective's messages: its name, its ranks, and how often they have called it before."""

    name: str
    group: tuple[int, ...]
    number: int


class Span(NamedTuple):
    """A bar of the picture. `op` is F, B, C (other computation) or S (a send); `label` is the number in the bar."""

    rank: int
    op: str
    label: object
    begin_s: float
    end_s: float


class Stopped(Exception):
    """A rank's program failed. Has the rank, the line of the program, and the error."""

    def __init__(self, rank: int, line: int | None, error: BaseException) -> None:
        super().__init__(str(error))
        self.rank, self.line, self.error = rank, line, error


class World:
    """All ranks, their messages and the clock.

    line    the line of the learner's program that is running, set by `running.traced`; None while only our own code runs
    """

    def __init__(self, num_ranks: int, network: Network) -> None:
        self.network, self.num_ranks, self.now_s = network, num_ranks, 0.0
        self.line: int | None = None
        self.memories = [Memory(rank) for rank in range(num_ranks)]
        self.comms = [Comm(self, rank) for rank in range(num_ranks)]
        self.sent_bytes = [0] * num_ranks
        self.num_sent = [0] * num_ranks
        self.spans: list[Span] = []
        self.forgotten: list[tuple[int, str, int | None]] = []
        self.tasks: list[Task] = []  # tasks that are not done
        self._num_awaits = 0
        self._sends_until = [0.0] * num_ranks
        self._receives_until = [0.0] * num_ranks
        self._computes_until = [0.0] * num_ranks
        self._mail: dict[object, deque[tuple[float, Value, int | None]]] = defaultdict(deque)
        self._receivers: dict[object, deque[Task]] = defaultdict(deque)
        self._due: list[tuple[float, int, Task, Callable[[], Any]]] = []
        self._num_due = 0

    def start(self, coroutine: Coroutine[Any, Any, Any], rank: int, line: int | None = None) -> Task:
        """Start a coroutine of a rank at the current time. `line` is the line of the program that asked for it."""
        task = Task(self, coroutine, rank, line)
        self.tasks.append(task)
        self._resume_at(self.now_s, task, lambda: None)
        return task

    def run(self) -> None:
        """Run until every task is done, or none can go on. Raises Stopped if a program fails."""
        while self._due:
            self.now_s, _, task, result = heapq.heappop(self._due)
            self._resume(task, result)

    def unread(self) -> list[tuple[int, int, int | None]]:
        """Return the sender, the receiver and the sender's line of each message that was never received."""
        return [(key[0], key[1], line) for key, mail in self._mail.items() for _, _, line in mail]  # type: ignore[index]

    def _resume_at(self, time_s: float, task: Task, result: Callable[[], Any]) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (time_s, self._num_due, task, result))

    def _resume(self, task: Task, result: Callable[[], Any]) -> None:
        task.waits, request = None, None
        try:
            # Pass the result on without a variable, which would keep it alive and count as memory of the program.
            request = task.coroutine.send(result())
            if not isinstance(request, Request):
                raise Fault("this awaits something that is not of comm; asyncio has no part in puzzles")
            self._num_awaits += 1
            if self._num_awaits > MOST_AWAITS:
                raise Fault(f"more than {MOST_AWAITS:,} awaits: an endless loop?")
            self.memories[task.rank].note(self.now_s, request.line)
            getattr(self, f"_{request.kind}")(task, request)
        except StopIteration as stop:
            task.is_done, task.result = True, stop.value
            self.tasks.remove(task)  # else its result would stay alive, and count as held memory
            self.memories[task.rank].note(self.now_s, None)
            for waiter in task.waiters:
                self._resume_at(self.now_s, waiter, lambda: task.result)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            asked_in = request.line if isinstance(request, Request) else task.line
            raise Stopped(task.rank, line_of_error(error) or asked_in, error) from error

    def _send(self, task: Task, request: Request) -> None:
        rank, to, value = task.rank, request.peer, request.value
        assert value is not None
        self.num_sent[rank] += 1
        if self.num_sent[rank] > MOST_MESSAGES:
            raise Fault(f"more than {MOST_MESSAGES} messages: a flood")
        self.sent_bytes[rank] += value.num_bytes
        long_s = self.network.seconds(value.num_bytes, rank, to)
        begin_s = max(self.now_s, self._sends_until[rank])
        self._sends_until[rank] = begin_s + long_s
        wire_s = long_s - self.network.seconds(0, rank, to)
        arrives_s = max(begin_s + long_s, self._receives_until[to] + wire_s)
        self._receives_until[to] = arrives_s
        self.spans.append(Span(rank, "S", to, begin_s, begin_s + long_s))
        key, message = (rank, to, request.tag), value.on(Memory(to))
        if self._receivers[key]:
            self._deliver(arrives_s, self._receivers[key].popleft(), message)
        else:
            self._mail[key].append((arrives_s, message, request.line))
        self._resume_at(self.now_s, task, lambda: None)

    def _recv(self, task: Task, request: Request) -> None:
        key = (request.peer, task.rank, request.tag)
        if self._mail[key]:
            arrives_s, message, _ = self._mail[key].popleft()
            self._deliver(max(self.now_s, arrives_s), task, message)
        else:
            task.waits = request
            self._receivers[key].append(task)

    def _deliver(self, time_s: float, task: Task, message: Value) -> None:
        self._resume_at(time_s, task, lambda: message.on(self.memories[task.rank]))

    def _compute(self, task: Task, request: Request) -> None:
        begin_s = max(self.now_s, self._computes_until[task.rank])
        end_s = self._computes_until[task.rank] = begin_s + request.seconds
        self.spans.append(Span(task.rank, *request.label, begin_s, end_s))
        self._resume_at(end_s, task, lambda: None)

    def _await(self, task: Task, request: Request) -> None:
        other = request.task
        assert other is not None
        if other.is_done:
            self._resume_at(self.now_s, task, lambda: other.result)
        else:
            task.waits = request
            other.waiters.append(task)


class Comm:
    """The first argument of a rank's program: its rank, the number of ranks, and methods to send, receive and compute."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.size = rank, world.num_ranks
        self._world = world
        self._num_collectives: dict[object, int] = defaultdict(int)
        self.collectives: Any = None  # the module of that name, unless they are what the puzzle asks for

    def send(self, value: Value, to: int, tag: object = None) -> Call:
        """Pass a value to the network card, and return at once. Messages of one tag between two ranks arrive in order."""
        line = self._world.line

        def steps() -> Steps:
            self._check_value(value, "send")
            self._check_peer(to, "sends to")
            if self._world.network.is_ring and to != (self.rank + 1) % self.size:
                after = (self.rank + 1) % self.size
                raise Fault(
                    f"rank {self.rank} sends to rank {to}; in this ring it can send to rank {after} only"
                )
            yield Request("send", line, value=value, peer=to, tag=tag)

        return Call(self._world, self.rank, "send", steps)

    def recv(self, source: int, tag: object = None) -> Call:
        """Wait for the next message from rank `source`, and return its value."""
        line = self._world.line

        def steps() -> Steps:
            self._check_peer(source, "receives from")
            return (yield Request("recv", line, peer=source, tag=tag))

        return Call(self._world, self.rank, "recv", steps)

    def compute(self, seconds: float, label: tuple[str, object] = ("C", "")) -> Call:
        """Compute for this many simulated seconds. Messages travel at the same time."""
        line = self._world.line

        def steps() -> Steps:
            if not isinstance(seconds, int | float) or not 0 <= seconds < 1e6:
                raise Fault(f"compute({seconds!r}) is not a number of seconds")
            yield Request("compute", line, seconds=seconds, label=label)

        return Call(self._world, self.rank, "compute", steps)

    def start(self, work: Awaitable[Any]) -> Task:
        """Start a call such as `comm.all_reduce(gradient)`, and return a handle at once; `await` it for the result."""
        if not hasattr(work, "__await__"):
            raise Fault(f"start is given {work!r}; it takes a call without its await")

        async def wrapped(work: Awaitable[Any]) -> Any:
            return await work

        return self._world.start(wrapped(work), self.rank, self._world.line)

    def join(self, values: list[Value]) -> Value:
        """Join chunks in the given order."""
        return join(values)

    def all_reduce(self, value: Value, ranks: Any = None) -> Call:
        """Return the sum over `ranks` (default: all). A ring, which sends 2(p-1)/p of the value's bytes."""
        return self._collective("all_reduce", value, ranks)

    def reduce_scatter(self, value: Value, ranks: Any = None) -> Call:
        """Return this rank's chunk of the sum over `ranks` (default: all). Sends (p-1)/p of the value's bytes."""
        return self._collective("reduce_scatter", value, ranks)

    def all_gather(self, value: Value, ranks: Any = None) -> Call:
        """Return the chunks of `ranks` (default: all), joined in that order. Sends (p-1) times the chunk's bytes."""
        return self._collective("all_gather", value, ranks)

    def _collective(self, name: str, value: Value, ranks: Any) -> Call:
        def steps() -> Steps:
            if self.collectives is None:
                raise Fault(f"comm.{name} is what this puzzle asks you to write, from send and recv")
            self._check_value(value, name)
            group = tuple(range(self.size) if ranks is None else ranks)
            self._check_group(group, name)
            # The k-th calls of a group's ranks belong together. The tag separates their messages from all others.
            number = self._num_collectives[name, group]
            self._num_collectives[name, group] += 1
            work = getattr(self.collectives, name)(self, value, group, CollectiveTag(name, group, number))
            return (yield from work.__await__())

        return Call(self._world, self.rank, name, steps)

    def _check_value(self, value: Any, what: str) -> None:
        if hasattr(value, "__await__"):
            raise Fault(f"{what} is given something that was not awaited: write await before that call")
        if not isinstance(value, Value):
            raise Fault(f"{what} is given {value!r}, which is not a value")
        if value.rank != self.rank:
            raise Fault(
                f"rank {self.rank} gives {what} a value of rank {value.rank}, which no message brought there"
            )

    def _check_group(self, group: tuple[int, ...], what: str) -> None:
        wrong = None
        if not set(group) <= set(range(self.size)):
            wrong = f"there are ranks 0 to {self.size - 1}"
        elif len(set(group)) < len(group):
            wrong = "a rank is in it twice"
        elif self.rank not in group:
            wrong = f"rank {self.rank} is not in it"
        if wrong:
            raise Fault(f"rank {self.rank} calls {what} with the group {list(group)}: {wrong}")

    def _check_peer(self, peer: Any, what: str) -> None:
        if isinstance(peer, bool) or not isinstance(peer, int) or not 0 <= peer < self.size:
            raise Fault(f"rank {self.rank} {what} rank {peer!r}; there are ranks 0 to {self.size - 1}")
        if peer == self.rank:
            raise Fault(f"rank {self.rank} {what} itself")


def line_of_error(error: BaseException) -> int | None:
    """Return the innermost line of the learner's program in an exception's traceback."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == PROGRAM:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
