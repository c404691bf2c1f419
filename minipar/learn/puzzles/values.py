"""Simulated tensors: they have no elements, but record the ranks whose parts were added, and occupy a rank's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

Parts = dict[str, Fraction]
"""The parts of a sum and their factors: {"rank 2": 1}, or {"rank 2": 1/4} if it is in an average over four ranks."""


class Fault(Exception):
    """A mistake in the learner's program, described in a sentence."""


class Memory:
    """The bytes that one rank holds, and their history.

    They are recorded whenever the rank's program awaits, so results that live only between two awaits cost nothing.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.held_bytes = 0
        # (time in seconds, bytes, line of the program)
        self.history: list[tuple[float, int, int | None]] = []
        self.storages: dict[
            int, tuple[str, int]
        ] = {}  # what is held: name and bytes of each storage, by its id
        self.at_peak: list[tuple[str, int]] = []  # what was held when the rank held most
        self._most_bytes = -1

    def note(self, time_s: float, line: int | None) -> None:
        """Record the bytes held now; `line` is the line in which the program waits."""
        self.history.append((time_s, self.held_bytes, line))
        if self.held_bytes > self._most_bytes:
            self._most_bytes, self.at_peak = self.held_bytes, list(self.storages.values())

    def peak(self) -> tuple[float, int, int | None]:
        """Return the time, the bytes and the line at which the rank held most."""
        return max(self.history, key=lambda entry: entry[1], default=(0.0, 0, None))


class Storage:
    """Bytes of a rank's memory, which are in use from the creation of this object until nothing refers to it."""

    __slots__ = ("_memory", "_num_bytes")

    def __init__(self, memory: Memory, num_bytes: int, name: str) -> None:
        self._memory, self._num_bytes = memory, num_bytes
        memory.held_bytes += num_bytes
        memory.storages[id(self)] = (name, num_bytes)

    def __del__(self) -> None:
        self._memory.held_bytes -= self._num_bytes
        del self._memory.storages[id(self)]


class Value:
    """A tensor, or some chunks of one. It is immutable: sums are new values, and chunks are views of the same memory.

    of      the name of the tensor, such as "gradient of layer 2"; only values with the same name can be added
    blocks  its chunks: for each, the index in the whole tensor, and the parts that were added into it
    about   data for a puzzle's own functions, such as the microbatch
    """

    def __init__(
        self,
        memory: Memory,
        of: str,
        blocks: Iterable[tuple[int, Parts]],
        block_bytes: int,
        about: tuple[int, ...] = (),
        storage: Storage | None = None,
    ) -> None:
        self.of, self.blocks, self.block_bytes, self.about = of, tuple(blocks), block_bytes, about
        self._memory = memory
        self._storage = storage or Storage(memory, len(self.blocks) * block_bytes, of)

    @property
    def num_bytes(self) -> int:
        """The bytes of the chunks, also if this is a view."""
        return len(self.blocks) * self.block_bytes

    @property
    def rank(self) -> int:
        """The rank in whose memory the value is."""
        return self._memory.rank

    def chunks(self, num_chunks: int) -> list[Value]:
        """Return equal chunks, as views: as long as one of them is alive, the whole value occupies memory.

        Raises Fault if the value cannot be cut into that many equal chunks.
        """
        total = len(self.blocks)
        if not isinstance(num_chunks, int) or num_chunks < 1 or total % num_chunks:
            raise Fault(f"chunks({num_chunks}) does not cut {self} evenly; it has {total} pieces")
        each = total // num_chunks
        cuts = [self.blocks[i * each : (i + 1) * each] for i in range(num_chunks)]
        return [
            Value(self._memory, self.of, cut, self.block_bytes, self.about, self._storage) for cut in cuts
        ]

    def on(self, memory: Memory) -> Value:
        """Return a copy in the given memory, as a message makes one."""
        return Value(memory, self.of, self.blocks, self.block_bytes, self.about)

    def __add__(self, other: object) -> Value:
        if hasattr(other, "__await__"):
            raise Fault("this adds something that was not awaited: write await before the call")
        if not isinstance(other, Value):
            raise Fault(f"this adds {other!r} to {self}; only values can be added")
        same_rank(self, other)
        _same_tensor("adds", self, other)
        if self.indices != other.indices:
            raise Fault(f"this adds {other} to {self}, which are different elements")
        blocks = []
        for (index, mine), (_, theirs) in zip(self.blocks, other.blocks):
            blocks.append(
                (index, {who: mine.get(who, Fraction()) + theirs.get(who, 0) for who in mine | theirs})
            )
        return Value(self._memory, self.of, blocks, self.block_bytes, self.about)

    def __radd__(self, other: object) -> Value:
        if other == 0:  # `sum` starts with 0
            return self
        return self + other

    def __iter__(self) -> Iterator[Value]:
        raise Fault(f"this uses {self} as a list; value.chunks(n) returns a list")

    def __mul__(self, factor: object) -> Value:
        if not isinstance(factor, int | float | Fraction):
            raise Fault(f"this multiplies {self} by {factor!r}, which is no number")
        exact = Fraction(factor).limit_denominator(10**6)
        blocks = [(index, {who: n * exact for who, n in parts.items()}) for index, parts in self.blocks]
        return Value(self._memory, self.of, blocks, self.block_bytes, self.about)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Value:
        if not isinstance(divisor, int | float | Fraction) or divisor == 0:
            raise Fault(f"this divides {self} by {divisor!r}")
        return self * (1 / Fraction(divisor))

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of the chunks in the whole tensor."""
        return tuple(index for index, _ in self.blocks)

    def __repr__(self) -> str:
        whole = self.indices == tuple(range(len(self.blocks))) and len(self.blocks) != 1
        names = " and ".join(f"chunk {index}" for index in self.indices)
        return f"the {self.of}" if whole else f"{names} of the {self.of}"


def join(values: Sequence[Value]) -> Value:
    """Join chunks in the given order, in new memory. Raises Fault if they are of different tensors."""
    values = list(values)
    for value in values:
        if not isinstance(value, Value):
            raise Fault(f"join is given {value!r}; it takes a list of values")
    if not values:
        raise Fault("join is given an empty list")
    first = values[0]
    for value in values[1:]:
        same_rank(first, value)
        _same_tensor("joins", first, value)
    blocks = [block for value in values for block in value.blocks]
    return Value(first._memory, first.of, blocks, first.block_bytes, first.about)


def _same_tensor(verb: str, mine: Value, other: Value) -> None:
    """Raise Fault if two values are of different tensors."""
    if mine.of != other.of:
        raise Fault(f"this {verb} the {other.of} to the {mine.of}")
    if mine.about != other.about:
        raise Fault(f"this {verb} the {other.of} to the {mine.of} of another microbatch or replica")


def name_of(given: object) -> str:
    """Return the name of a value's tensor, as "the output of stage 1"; of anything else, its representation."""
    return f"the {given.of}" if isinstance(given, Value) else repr(given)


def same_rank(mine: Value, other: Value) -> None:
    """Raise Fault if two values are on different ranks."""
    if mine.rank != other.rank:
        raise Fault(
            f"this uses a value of rank {other.rank} on rank {mine.rank}, and no message brought it there"
        )


def parts_of(*names: str) -> Parts:
    """Return the parts of a sum to which each name was added once."""
    return dict.fromkeys(names, Fraction(1))


def missing_parts(names: list[str]) -> str:
    """Format names as "the part of a is" or "the parts of a and b are"."""
    return f"the parts of {listed(names)} are" if len(names) > 1 else f"the part of {names[0]} is"


def listed(names: Iterable[str]) -> str:
    """Format names as "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
