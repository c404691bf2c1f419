"""Specification of a scheduler's step: the tokens of each sequence to process, and which sequences get or give up blocks.

More than one plan can be right: a short prompt may overtake one for which there are too few blocks, or wait behind it. So a
plan is not compared with another plan, but checked by rules: it keeps to the budget, the blocks and the order of arrival,
and no sequence waits or gives up its blocks without need.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any, NamedTuple

from minipar.spec.specification import Specification, Stage, StageName
from minipar.spec.words import first


class Text:
    """An unfinished sequence. `tokens` are its prompt and generated tokens; the first num_read of them are in the cache."""

    def __init__(self, number: int, num_prompt: int, num_new: int):
        self.number = number
        self.tokens = [100 * (number // 2) + i for i in range(num_prompt)]  # two texts may be equal
        self.end = num_prompt + num_new
        self.table: list[int] = []
        self.num_read = 0

    @property
    def unread(self) -> list[int]:
        return self.tokens[self.num_read :]


class Pool:
    """Blocks of `size` tokens, a free list, and no other state."""

    def __init__(self, number: int, size: int):
        self.number, self.size, self.free = number, size, list(range(number))

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Add blocks until the table has room for `num_tokens`; if too few blocks are free, add none and return False."""
        lacking = self.blocks_for(num_tokens) - len(table)
        if lacking > len(self.free):
            return False
        table += [self.free.pop() for _ in range(lacking)]
        return True

    def release(self, table: list[int]) -> None:
        self.free += table
        table.clear()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)


class Before(NamedTuple):
    """The state of a sequence before the plan."""

    tokens: list[int]
    num_read: int
    num_blocks: int

    @property
    def unread(self) -> int:
        return len(self.tokens) - self.num_read


class Case(NamedTuple):
    """Requests as (arrival step, prompt tokens, new tokens), blocks, and a budget of tokens per step."""

    requests: list[tuple[int, int, int]]
    num_blocks: int
    size: int
    budget: int

    @classmethod
    def drawn(cls, seed: int) -> Case:
        rng = Random(seed)
        few = min(8, 1 + seed // 6)
        requests = sorted(
            (rng.choice([0, 0, 1, 4]), rng.randint(1, 9), rng.randint(1, 8))
            for _ in range(rng.randint(1, few))
        )
        size = rng.randint(1, 4)
        longest = max(-(-(prompt + new) // size) for _, prompt, new in requests)
        return cls(requests, longest + rng.choice([0, 0, 1, 2, 20]), size, rng.choice([1, 2, 3, 5, 8, 40]))


class Step:
    """One step of a case: the sequences and blocks before and after the plan."""

    def __init__(self, case: Case, number: int, pool: Pool, line: list[Text]):
        self.case, self.number, self.pool, self.line = case, number, pool, line
        self.before = [Before(list(t.tokens), t.num_read, len(t.table)) for t in line]
        self.free_before = len(pool.free)

    def __str__(self) -> str:
        texts = ", ".join(
            f"{t.number}: {b.num_read}/{b.unread}/{b.num_blocks}" for t, b in zip(self.line[:6], self.before)
        )
        return (
            f"step {self.number}, budget {self.case.budget}, {self.free_before} of {self.case.num_blocks} blocks of "
            f"{self.case.size} free, texts, read/unread/blocks: {texts}"
        )

    def wrong_plan(self, pieces: Any) -> str | None:
        if not isinstance(pieces, list):
            return f"plan returned a {type(pieces).__name__}; return a list of (text, tokens)"
        return (
            self._wrong_pieces(pieces)
            or self._wrong_blocks()
            or self._wrong_tables(pieces)
            or self._unfair(pieces)
        )

    def _wrong_pieces(self, pieces: list[Any]) -> str | None:
        seen = set[int]()
        for piece in pieces:
            if not isinstance(piece, tuple | list) or len(piece) != 2 or not isinstance(piece[0], Text):
                return f"a piece is {piece!r:.60}; it should be (text, tokens)"
            text, tokens = piece
            if text not in self.line:
                return f"text {text.number} reads, and is not waiting"
            if text.number in seen:
                return f"text {text.number} reads twice in one step"
            seen.add(text.number)
            if not len(tokens) or list(tokens) != text.unread[: len(tokens)]:
                return f"text {text.number} reads {list(tokens)}; its unread tokens are {text.unread}"
        if (total := sum(len(tokens) for _, tokens in pieces)) > self.case.budget:
            return f"{total} tokens are read; the budget is {self.case.budget}"
        return None

    def _wrong_blocks(self) -> str | None:
        """Check that every block is free or in one table."""
        places: dict[int, list[str]] = {block: [] for block in range(self.case.num_blocks)}
        for place, blocks in [
            ("free", self.pool.free),
            *((f"held by text {t.number}", t.table) for t in self.line),
        ]:
            for block in blocks:
                places[block].append(place)
        for block, found in places.items():
            if not found:
                return f"block {block} is neither free nor in a table: it leaked"
            if len(found) > 1:
                return f"block {block} is {' and '.join(found)}"
        return None

    def _wrong_tables(self, pieces: list[Any]) -> str | None:
        count = {text.number: len(tokens) for text, tokens in pieces}
        for text, before in zip(self.line, self.before):
            if text.tokens != before.tokens:
                return f"the tokens of text {text.number} changed; a text that gives up its blocks keeps its tokens"
            gave_up = before.num_read > 0 and text.num_read == 0
            if text.num_read != before.num_read and not gave_up:
                return (
                    f"num_read of text {text.number} became {text.num_read}; `advance` counts what was read"
                )
            end = text.num_read + count.get(text.number, 0)
            due = 0 if gave_up else before.num_blocks
            due = self.pool.blocks_for(end) if text.number in count else due
            if len(text.table) != due:
                does = (
                    f"reads up to {end} tokens"
                    if text.number in count
                    else f"reads nothing, with num_read = {end}"
                )
                return (
                    f"text {text.number} {does}, and holds {_blocks(len(text.table))}; it should hold {due}"
                )
        return None

    def _unfair(self, pieces: list[Any]) -> str | None:
        """Check that each sequence gets as many tokens as it can: decodes first, then prompts, both in order of arrival."""
        count = {text.number: len(tokens) for text, tokens in pieces}
        rows = list(zip(self.line, self.before))
        victims = [t for t, b in rows if b.num_read > 0 and t.num_read == 0]
        order = [text for text, _ in sorted(rows, key=lambda row: row[1].unread > 1)]
        used, denied, prompts_wait = 0, list[Text](), False
        for text in order:
            before = self.before[self.line.index(text)]
            left = self.case.budget - used
            if text.number in count:
                if count[text.number] != (most := min(len(text.unread), left)):
                    return (
                        f"text {text.number} reads {count[text.number]} of its {len(text.unread)} unread tokens; in its "
                        f"turn the budget leaves it {most}"
                    )
                used += count[text.number]
                continue
            is_prompt = before.unread > 1
            if text in victims or left == 0:
                prompts_wait |= text in victims
                continue
            num_tokens = min(before.unread, left)
            need = self.pool.blocks_for(before.num_read + num_tokens) - before.num_blocks
            turn = order.index(text)
            room = self._room(text, [t for t in order[:turn] if t.number in count], victims)
            if need > room:
                denied.append(text)
                prompts_wait |= is_prompt
            elif not (is_prompt and prompts_wait):  # else it may wait behind a prompt that got no blocks
                ahead = next((t.number for t in order[turn:] if t.number in count), None)
                overtaken = "" if ahead is None else f", and text {ahead} reads before its turn"
                return (
                    f"text {text.number} waits{overtaken}: the budget leaves {num_tokens} of its {before.unread} unread "
                    f"tokens; it needs {_blocks(need)} more, and {room} could be had"
                )
        return self._unfair_to_victims(victims, count, denied)

    def _room(self, text: Text, reading: list[Text], victims: list[Text]) -> int:
        """Return a lower bound on the blocks that a sequence could get in its turn: free ones, and later sequences' blocks.

        Later sequences that run in this step keep their blocks. Blocks given up by earlier sequences are subtracted, since
        these may have given them up only after its turn.
        """
        place = self.line.index(text)
        behind = sum(len(t.table) for t in self.line[place + 1 :] if t not in reading)
        too_late = sum(b.num_blocks for t, b in zip(self.line[:place], self.before) if t in victims)
        return len(self.pool.free) + behind - too_late

    def _unfair_to_victims(
        self, victims: list[Text], count: dict[int, int], denied: list[Text]
    ) -> str | None:
        if not victims:
            return None
        place = self.line.index(victims[0])
        for text in self.line[place + 1 :]:
            if text.table and text.number not in count and text not in victims:
                return f"text {victims[0].number} gave up its blocks, and text {text.number}, after it in line, kept them"
        before_it = [t for t in self.line[:place] if t.number in count or t in denied]
        if not before_it:
            return f"text {victims[0].number} gave up its blocks for texts after it in line"
        had = self.before[place].num_blocks
        if (
            had <= len(self.pool.free)
            and victims[0].number not in count
            and not any(t in denied for t in before_it)
        ):
            return f"text {victims[0].number} gave up {_blocks(had)} without need: {len(self.pool.free)} are free"
        return None

    def wrong_advance(
        self, pieces: list[tuple[Text, list[int]]], chosen: list[int], were: dict[int, Before]
    ) -> str | None:
        written = {text.number: (len(tokens), token) for (text, tokens), token in zip(pieces, chosen)}
        for text in self.line:
            was = were[text.number]
            count, token = written.get(text.number, (0, -1))
            num_read, tokens = was.num_read + count, list(was.tokens)
            if count and num_read == len(tokens):
                tokens.append(token)
            what = f"after advance text {text.number}"
            if text.tokens != tokens:
                has = "has read all of its tokens" if len(tokens) > len(was.tokens) else "has unread tokens"
                return f"{what} {has}, and has {len(text.tokens)}; it should have {len(tokens)}, the last {tokens[-1]}"
            finished = len(tokens) == text.end
            due = (text.num_read, 0) if finished else (num_read, was.num_blocks)
            if due != (text.num_read, len(text.table)):
                state = "is finished" if finished else "is not finished"
                has = f"num_read = {text.num_read} and {_blocks(len(text.table))}"
                return f"{what} {state}, and has {has}; it should have {due[0]} and {due[1]}"
        return self._wrong_blocks()


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"


def _served(scheduler: Any, case: Case) -> str | None:
    """Run the case to its end; describe the first step in which something is wrong."""
    pool = Pool(case.num_blocks, case.size)
    texts = [Text(i, prompt, new) for i, (_, prompt, new) in enumerate(case.requests)]
    most = 10 + 20 * sum(prompt + new for _, prompt, new in case.requests)
    for number in range(most):
        line = [
            t for t, (arrival, *_) in zip(texts, case.requests) if arrival <= number and len(t.tokens) < t.end
        ]
        if not line and all(len(t.tokens) == t.end for t in texts):
            return None
        step = Step(case, number, pool, line)
        pieces = scheduler.plan(pool, list(line), case.budget)
        if words := step.wrong_plan(pieces):
            return f"{words} ({step})"
        chosen = [1000 + 100 * number + i for i in range(len(pieces))]
        were = {t.number: Before(list(t.tokens), t.num_read, len(t.table)) for t in line}
        scheduler.advance(pool, pieces, list(chosen))
        if words := step.wrong_advance(pieces, chosen, were):
            return f"{words} ({step})"
    unfinished = [t.number for t in texts if len(t.tokens) < t.end]
    return f"after {most} steps the texts {unfinished} are not finished: {case}"


CASES: dict[StageName, list[Case]] = {
    "runs": [Case([], 1, 1, 1), Case([(0, 1, 1)], 1, 2, 1)],
    "small": [
        Case([(0, 3, 2)], 3, 2, 2),  # a prompt in chunks, then a decode
        Case([(0, 2, 2), (0, 2, 2)], 4, 2, 4),
        Case([(0, 2, 3), (1, 4, 1)], 5, 2, 3),  # a decode before a prompt
        Case([(0, 2, 4), (0, 2, 4)], 3, 2, 8),  # one of them must give up its blocks
    ],
    "drawn": [Case.drawn(seed) for seed in range(200)],
    "varied": [
        Case([(i // 3, 1 + 7 * i % 40, 1 + 5 * i % 23) for i in range(30)], 20, 4, 16),
        Case([(0, 300, 3), (0, 1, 50), (2, 40, 40)], 30, 16, 64),
        Case([(0, 8, 9)] * 9, 5, 4, 9),
    ],
}


def _each(scheduler: Any, cases: list[Case]) -> str | None:
    return first(_served(scheduler, case) for case in cases)


SPECIFICATIONS = [
    Specification(
        "scheduler_step",
        "plan(pool, waiting, budget) -> [(text, tokens), ...]; advance(pool, pieces, chosen)",
        "Each step reads tokens of several texts within the budget and the blocks; finished texts leave at once.",
        tuple(Stage(name, partial(_each, cases=cases), ()) for name, cases in CASES.items()),
    )
]
