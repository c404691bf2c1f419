"""Verdicts: say in one sentence what is wrong with a learner's program, and compare its costs with the best known."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from minipar.learn.puzzles.network import CollectiveTag, Request, Task
from minipar.learn.puzzles.puzzle import Limit, Puzzle, Wanted
from minipar.learn.puzzles.running import EndlessLoop, Run, compiled, run
from minipar.learn.puzzles.values import Fault, Memory, Parts, Value, listed, missing_parts

ROUNDING = 1 + 1e-9


class Figure(NamedTuple):
    """A measured figure with its limit and the best known value, in bytes or seconds."""

    name: str
    value: float
    most: float
    best: float
    formula: str
    details: str = ""


class Verdict(NamedTuple):
    """Whether the program solves the puzzle, or a sentence that says why not and the line at fault, if there is one.

    `run` is the run that was judged, or None if the source cannot be compiled. `figures` belong to that run.
    """

    is_right: bool
    text: str
    line: int | None
    figures: tuple[Figure, ...]
    run: Run | None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return "\n".join([f"{where}{self.text}", *(figure_text(f) for f in self.figures)])


def unreadable(source: str) -> Verdict | None:
    """Return the verdict on a program that Python cannot read, or None where it can. Runs nothing."""
    try:
        compiled(source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        return Verdict(
            False, f"Python cannot read the program: {getattr(error, 'msg', error)}", line, (), None
        )
    return None


def check(puzzle: Puzzle, source: str) -> Verdict:
    """Run a program on each of the puzzle's sizes. Return the verdict on the first size that fails, else on the first."""
    if (verdict := unreadable(source)) is not None:
        return verdict
    code = compiled(source)
    first = judged(run(puzzle, code, puzzle.sizes[0]))
    if not first.is_right:
        return first
    for size in puzzle.sizes[1:]:
        verdict = judged(run(puzzle, code, size))
        if not verdict.is_right:
            return verdict._replace(text=f"right on {puzzle.sizes[0]} ranks, but on {size}: {verdict.text}")
    return first


def judged(done: Run) -> Verdict:
    """Return the verdict on one run.

    Checks, in this order: errors, calls that were not awaited, ranks that still wait, wrong results, messages that were
    not received; then bytes sent, memory and time.
    """
    for fault in (_stopped, _forgotten, _waiting, _wrong_result, _unread):
        found = fault(done)
        if found:
            return Verdict(False, *found, (), done)
    figures = _figures(done)
    for fault in (_sent, _memory, _seconds):
        found = fault(done)
        if found:
            return Verdict(False, *found, figures, done)
    return Verdict(True, _praise(figures), None, figures, done)


Found = tuple[str, int | None] | None


# Errors ------------------------------------------------------------------------------------------------------------------


def _stopped(done: Run) -> Found:
    if done.stopped is None:
        return None
    error, rank = done.stopped.error, done.stopped.rank
    if isinstance(error, Fault):
        text = str(error)
        return (text if f"rank {rank}" in text else f"on rank {rank}, {text}"), done.stopped.line
    if isinstance(error, EndlessLoop):
        return f"rank {rank} is {error}", done.stopped.line
    if isinstance(error, NotImplementedError):
        return "this is where your program goes", done.stopped.line
    if isinstance(error, RecursionError):
        return f"on rank {rank}, a function calls itself without end", done.stopped.line
    return f"on rank {rank}: {type(error).__name__}: {error}", done.stopped.line


def _forgotten(done: Run) -> Found:
    for rank, name, line in done.forgotten:
        return f"rank {rank} never awaits comm.{name}, so it does not happen: write await before it", line
    return None


# Ranks that wait ---------------------------------------------------------------------------------------------------------


def _waiting(done: Run) -> Found:
    # If a rank waits for several messages, keep the first wait.
    stuck = reversed(done.world.tasks)
    waits = {task.rank: task.waits for task in stuck if task.waits and task.waits.kind == "recv"}
    if not waits:
        return None
    cycle = _cycle({rank: request.peer for rank, request in waits.items()})
    named = cycle or [next(rank for rank, request in waits.items() if request.peer not in waits)]
    sentence = "; ".join(_waits(rank, waits[rank], done) for rank in named)
    kind = "deadlock, " if cycle else ""
    return f"{kind}after {_ms(done.world.now_s)} nothing moves: {sentence}", waits[named[0]].line


def _cycle(waits_for: dict[int, int]) -> list[int]:
    """Return a cycle of ranks that wait for each other, or [] if there is none."""
    for first in waits_for:
        path = [first]
        while waits_for.get(path[-1]) is not None:
            after = waits_for[path[-1]]
            if after in path:
                circle = path[path.index(after) :]
                begin = circle.index(min(circle))
                return circle[begin:] + circle[:begin]
            path.append(after)
    return []


def _waits(rank: int, request: Request, done: Run) -> str:
    goes_on = any(task.rank == request.peer for task in done.world.tasks)
    ended = "" if goes_on else ", which has ended"
    where = f" in line {request.line}" if request.line else ""
    inside = ""
    if isinstance(request.tag, CollectiveTag):
        inside = f" in {request.tag.name} over ranks {listed(map(str, request.tag.group))}"
    return f"rank {rank} waits{where}{inside} for a message from rank {request.peer}{ended}"


def _unread(done: Run) -> Found:
    for sender, receiver, line in done.world.unread():
        return f"rank {sender} sends a message to rank {receiver} that rank {receiver} never receives", line
    return None


# Wrong results ---------------------------------------------------------------------------------------------------------


def _wrong_result(done: Run) -> Found:
    for rank, result in enumerate(done.results):
        found = difference(result, done.job.wanted(rank), rank)
        if found:
            return found, None
    return None


def difference(got: Any, wanted: Any, rank: int, place: str = "", says_place: bool = False) -> str | None:
    """Describe how a rank's result differs from the expected one; None if it does not.

    `place` is that of the result in a list. With `says_place`, faults of a single chunk or part name it too.
    """
    whose = f"rank {rank}"
    if isinstance(wanted, list | tuple) and not isinstance(wanted, Wanted):
        what = f"{len(wanted)} values"
        names = [one.of for one in wanted]
        says_place = len(set(names)) < len(names)  # else a value's name tells which one it is
        if not isinstance(got, list | tuple):
            return f"{whose} returns {_described(got)}; it should return {what}"
        if len(got) != len(wanted):
            return f"{whose} returns {len(got)} values; it should return {what}"
        for number, (one, other) in enumerate(zip(got, wanted)):
            found = difference(one, other, rank, f" at place {number}", says_place)
            if found:
                return found
        return None
    if not isinstance(got, Value):
        return f"{whose} returns {_described(got)}{place}; it should return the {wanted.of}"
    if got.rank != rank:
        return f"{whose} returns a value of rank {got.rank}, which no message brought there"
    if got.of != wanted.of:
        return f"{whose} returns the {got.of}{place}; it should be the {wanted.of}"
    returns = f"{whose} returns{place if says_place else ''}"
    return _wrong_chunks(got, wanted, returns) or _wrong_parts(got, wanted, returns)


def _described(got: Any) -> str:
    if got is None:
        return "nothing"
    if isinstance(got, Task) or hasattr(got, "__await__"):
        return "something that was not awaited"
    if isinstance(got, list | tuple):
        return f"a {type(got).__name__} of {len(got)}"
    return str(got) if isinstance(got, Value) else repr(got)[:60]


def _wrong_chunks(got: Value, wanted: Wanted, returns: str) -> str | None:
    have, need = got.indices, tuple(index for index, _ in wanted.blocks)
    if have == need:
        return None
    for index in need:
        if index not in have:
            others = f"; it has {_named('chunk', have)}" if len(need) == 1 else ""
            return f"chunk {index} is missing from the {wanted.of} that {returns}{others}"
    if len(need) < len(have) and not set(have) <= set(need):
        return f"{returns} {got}; it should be {_named('chunk', need)} alone"
    for index in have:
        if have.count(index) > 1:
            return f"chunk {index} is there {_times(have.count(index))} in the {wanted.of} that {returns}"
    return f"{returns} the chunks of the {wanted.of} in the order {list(have)}"


def _wrong_parts(got: Value, wanted: Wanted, returns: str) -> str | None:
    wrong = []
    for (index, parts), (_, need) in zip(got.blocks, wanted.blocks):
        said = wrong_parts(parts, need)
        if said:
            wrong.append((index, said))
    if not wrong:
        return None
    index, said = wrong[0]
    everywhere = len(wrong) == len(wanted.blocks) and all(other == said for _, other in wrong)
    where = "" if everywhere else f", chunk {index}"
    return f"in the {wanted.of} that {returns}{where}, {said}"


def wrong_parts(got: Parts, wanted: Parts) -> str | None:
    """Say which part is missing from a sum, was added too often, or does not belong in it; None if all are right."""
    missing = [who for who in wanted if not got.get(who)]
    if missing:
        return f"{missing_parts(missing)} missing"
    foreign = [who for who, count in got.items() if count and who not in wanted]
    if foreign:
        return f"{listed(foreign)} {'have' if len(foreign) > 1 else 'has'} no part, and yet it is there"
    ratios = {who: Fraction(got[who]) / wanted[who] for who in wanted}
    unlike = [who for who, ratio in ratios.items() if ratio != 1]
    if not unlike:
        return None
    ratio = ratios[unlike[0]]
    if len(unlike) == len(wanted) and len(set(ratios.values())) == 1:
        return _wrong_factor(ratio, got[unlike[0]], wanted[unlike[0]])
    if wanted[unlike[0]] == 1:
        return f"the part of {unlike[0]} comes {_times(ratio)}"
    return f"the part of {unlike[0]} counts {got[unlike[0]]}, and should count {wanted[unlike[0]]}"


def _wrong_factor(ratio: Fraction, got: Fraction, wanted: Fraction) -> str:
    if got == 1:
        return f"everything counts {_times(ratio)}: a sum, where the average is asked for; divide by {ratio}"
    should = f"everything counts {got}, and should count {wanted}"
    if ratio < 1:
        return f"{should}: it was divided twice, or by too large a number"
    return f"{should}: {'it was added more than once' if wanted == 1 else 'it was divided by too small a number'}"


def _times(count: Fraction | int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _named(noun: str, numbers: Iterable[int]) -> str:
    return listed(f"{noun} {number}" for number in numbers) if numbers else f"no {noun}"


# Costs -------------------------------------------------------------------------------------------------------------------


def _figures(done: Run) -> tuple[Figure, ...]:
    job, world = done.job, done.world
    figures = [
        Figure("sent by the busiest rank", max(world.sent_bytes), *job.sent),
        Figure("time", world.now_s, *job.seconds),
    ]
    peaks = [memory.peak()[1] for memory in world.memories]
    limits = job.memory
    if limits is None:
        figures.append(Figure("held by the fullest rank", max(peaks), float("inf"), float("inf"), ""))
    else:
        too_full = [rank for rank, peak in enumerate(peaks) if peak > limits[rank].most * ROUNDING]
        # The rank of which the verdict speaks, or else the one that is nearest to its limit.
        near = max(range(len(peaks)), key=lambda rank: peaks[rank] / limits[rank].most)
        rank = too_full[0] if too_full else near
        unlike_best = peaks[rank] > limits[rank].best * (1 + 1e-6)
        details = held_at_peak(world.memories[rank]) if unlike_best else ""
        figures.append(Figure(f"held by rank {rank}", peaks[rank], *limits[rank], details))
    return tuple(figures)


def held_at_peak(memory: Memory) -> str:
    """List what a rank held when it held most, as "weights of layers 0 and 1, 120 MB each; output, 8 MB"."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name, num_bytes in memory.at_peak:
        if num_bytes:
            kind, _, number = name.partition(" of layer ")
            groups.setdefault((kind, num_bytes), []).append(number)
    said = []
    for (kind, num_bytes), numbers in groups.items():
        layers = sorted({int(number) for number in numbers if number})
        of = f" of layer{'s' * (len(layers) > 1)} {listed(map(str, layers))}" if layers else ""
        times = f"{len(numbers)} times " if len(numbers) > max(len(layers), 1) else ""
        each = " each" if len(numbers) > 1 else ""
        said.append(f"{times}{kind}{of}, {_mb(num_bytes)}{each}")
    return "; ".join(said)


def _sent(done: Run) -> Found:
    most = max(done.world.sent_bytes)
    limit = done.job.sent
    if most <= limit.most * ROUNDING:
        return None
    rank = done.world.sent_bytes.index(most)
    return f"the result is right, but rank {rank} sends {_mb(most)}; {_enough(limit, _mb)}", None


def _memory(done: Run) -> Found:
    for rank, limit in enumerate(done.job.memory or ()):
        time_s, num_bytes, line = done.world.memories[rank].peak()
        if num_bytes > limit.most * ROUNDING:
            said = f"rank {rank} holds {_mb(num_bytes)} after {_ms(time_s)}; {_enough(limit, _mb)}"
            return f"the result is right, but {said}", line
    return None


def _seconds(done: Run) -> Found:
    limit = done.job.seconds
    if done.world.now_s <= limit.most * ROUNDING:
        return None
    return f"the result is right, but it takes {_ms(done.world.now_s)}; {_enough(limit, _ms)}", None


def _enough(limit: Limit, unit: Any) -> str:
    if limit.most == limit.best:
        return f"{unit(limit.best)} is enough: {limit.formula}"
    return f"the limit is {unit(limit.most)}"


def _praise(figures: tuple[Figure, ...]) -> str:
    better = {"sent": "sends less", "time": "is faster", "held": "holds less"}
    unlike = [better[f.name.split()[0]] for f in figures if f.formula and f.value > f.best * (1 + 1e-6)]
    return f"right; the best known {listed(unlike)}" if unlike else "right, and as good as the best known"


def figure_text(figure: Figure) -> str:
    """Format a figure as a line of text."""
    unit = _ms if figure.name == "time" else _mb
    best = f"; best known {unit(figure.best)} = {figure.formula}" if figure.formula else ""
    details = f". These {unit(figure.value)} are: {figure.details}" if figure.details else ""
    return f"{figure.name}: {unit(figure.value)}{best}{details}"


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.6g} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
