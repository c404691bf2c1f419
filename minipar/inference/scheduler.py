"""Continuous batching: how many tokens of which requests are in the next step, and which blocks they get. No tensors here.

Adds to `simple/continuous.py`: policies, prefix hits, drafts, swapping, and a plan that is the same on every rank.

A static batch runs until its longest request is done, while the rows of finished requests are padding. Here requests enter
and leave at every step. A token is "read" once its keys and values are in the cache. Each step reads at most
`token_budget` tokens:

    1. decodes     requests with one unread token, the last one generated: one row each
    2. prefill     unread prompts, in pieces that fit the rest of the budget, so that no long prompt delays the decodes
    3. drafts      if budget is left after that: guessed tokens to be verified; see speculative.py

Blocks are taken as texts grow. When none is free, the prefix cache gives up its blocks, and then the lowest-priority
request gives up all of its blocks: it is preempted. Later the keys and values of its prompt and of all tokens generated so
far are recomputed, or copies of its blocks are loaded from CPU memory (swap). Either way it continues from the same tokens
at the same positions, so its text is the same.

The highest-priority request is never preempted, and the pool has enough blocks for any one request, so each step makes
progress: some request gets a new token, or a piece of the highest-priority prompt is prefilled.

In a pipeline several steps are in flight (`rotation.py`). A request is in at most one of them, and keeps its blocks
meanwhile. If these requests hold all blocks, a plan may be empty until one of the steps has ended.

Source: Orca, OSDI 2022, section 4 (requests enter and leave at every step); Sarathi-Serve, arXiv:2403.02310 (pieces of
prompts in the same step as decodes); PagedAttention, arXiv:2309.06180, section 4.5 (preemption).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minipar.inference.blocks import BlockPool, blocks_for
from minipar.inference.policy import Policy
from minipar.inference.prefix import PrefixCache
from minipar.inference.request import Request
from minipar.inference.rotation import share
from minipar.inference.speculative import Guess


@dataclass(eq=False)
class Sequence:
    """A request that is being served.

    text      the prompt and the tokens generated so far
    table     its blocks
    num_read  number of leading tokens of the text whose keys and values are in the blocks, or swapped out
    is_under_way  whether it is in a step in flight, whose tokens are not known yet
    takes_guesses  whether a draft may guess its next tokens
    """

    number: int
    request: Request
    text: list[int]
    table: list[int] = field(default_factory=list)
    num_read: int = 0
    num_served: int = 0
    is_swapped: bool = False
    is_under_way: bool = False
    takes_guesses: bool = True

    @classmethod
    def of(cls, number: int, request: Request) -> Sequence:
        return cls(number, request, list(request.prompt))

    @property
    def arrival_s(self) -> float:
        return self.request.arrival_s

    @property
    def unread(self) -> int:
        return len(self.text) - self.num_read

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - self.num_read

    @property
    def max_drafts(self) -> int:
        """The maximum number of drafts worth verifying: one less than the tokens left, since the model adds its own."""
        return self.request.max_tokens - len(self.text) - 1 if self.takes_guesses else 0


@dataclass
class Read:
    """The tokens of a sequence in a step: its next `count` tokens, then `guesses`, at most `num_drafts` of them."""

    sequence: Sequence
    count: int
    num_drafts: int = 0
    guesses: list[Guess] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        """Whether the step reads the text to its end, so that the next token can be chosen."""
        return self.count == self.sequence.unread

    @property
    def takes_likeliest(self) -> bool:
        """Whether the next token is the last row's likeliest one, whatever else."""
        return self.writes and not self.guesses and self.sequence.request.temperature == 0


@dataclass
class Plan:
    """The work of a step, in this order: save, copy and load blocks, then run the model on `reads`.

    preempted  (sequence, the blocks it gave up); with swapping, these blocks are saved first
    copies     (source, destination) blocks, in order
    restored   swapped-out sequences, to be loaded into their new blocks
    hits       (sequence that begins with blocks of the prefix cache, number of its tokens found there)
    """

    reads: list[Read] = field(default_factory=list)
    preempted: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    restored: list[Sequence] = field(default_factory=list)
    hits: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(read.count + read.num_drafts for read in self.reads)


def check_blocks(request: Request, num_blocks: int, block_size: int) -> None:
    """Raise ValueError if the request may need more blocks than there are. Its last token's are never needed."""
    needed = blocks_for(request.max_tokens - 1, block_size)
    if needed > num_blocks:
        raise ValueError(
            f"{request.max_tokens} tokens need {needed} blocks of {block_size}; num_blocks={num_blocks}"
        )


class Scheduler:
    """Plans one step after another.

    token_budget  maximum number of tokens in a step
    max_running   maximum number of requests that are in steps in flight or may enter the next step, over all groups
    num_drafts    maximum number of guessed tokens of a request in a step
    swap          whether preempted sequences are saved in CPU memory, instead of being recomputed
    rounded       whether full blocks are quantized; then a prefill can resume only at the first token of a block
    num_groups    maximum number of steps in flight
    """

    def __init__(
        self,
        pool: BlockPool,
        policy: Policy,
        token_budget: int,
        max_running: int,
        prefix: PrefixCache | None = None,
        num_drafts: int = 0,
        swap: bool = False,
        rounded: bool = False,
        num_groups: int = 1,
    ):
        self.pool, self.policy, self.prefix = pool, policy, prefix
        self.token_budget, self.max_running = token_budget, max_running
        self.num_drafts, self.swap, self.rounded = num_drafts, swap, rounded
        self.num_groups = num_groups
        self.sequences: list[Sequence] = []
        self._plan = Plan()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError if it may need more blocks than the pool has."""
        check_blocks(sequence.request, self.pool.num_blocks, self.pool.block_size)
        self.sequences.append(sequence)

    def plan(self, num_under_way: int = 0) -> Plan:
        """Choose the tokens of the next step, and take blocks for them, while `num_under_way` other steps are in flight."""
        self._plan = plan = Plan()
        self.sequences.sort(key=self.policy.rank)
        budget = self.token_budget
        for sequence in sorted(self._group(num_under_way), key=lambda s: s.unread > 1):
            if budget == 0:
                break
            if any(sequence is victim for victim, _ in plan.preempted):
                continue
            if not self._admit(sequence, budget):
                if sequence.unread > 1:
                    break  # no later prompt may overtake this one
                continue
            count = min(sequence.unread, budget)
            plan.reads.append(Read(sequence, count))
            budget -= count
        for read in plan.reads:
            if read.count == 1 and read.writes:
                read.num_drafts = self._room_for_drafts(read.sequence, min(self.num_drafts, budget))
                budget -= read.num_drafts
            assert not read.sequence.is_under_way, "a request enters a step before its tokens are back"
            read.sequence.is_under_way = True
        assert plan.reads or num_under_way or not self.sequences, "the first in rank can always read"
        return plan

    def _group(self, num_under_way: int) -> list[Sequence]:
        """Return the sequences that may enter the next step: the first ones with blocks, and the first ones without."""
        free = [s for s in self.sequences if not s.is_under_way]
        num_reading = len(self.sequences) - len(free)
        free = free[: max(0, self.max_running - num_reading)]
        running = sum(bool(s.table) for s in free)
        places = {
            True: share(running, running + num_reading, num_under_way, self.num_groups),
            False: share(len(free) - running, len(free) - running, num_under_way, self.num_groups),
        }
        group = []
        for sequence in free:
            if places[bool(sequence.table)]:
                places[bool(sequence.table)] -= 1
                group.append(sequence)
        return group

    def advance(self, sequence: Sequence, num_read: int) -> None:
        """Note that the next `num_read` tokens of the text are in the cache; release the blocks beyond them."""
        sequence.is_under_way = False
        full = sequence.num_read // self.pool.block_size
        sequence.num_read += num_read
        sequence.num_served += num_read
        self._release(sequence, keep=blocks_for(sequence.num_read, self.pool.block_size))
        if self.prefix is not None and sequence.num_read // self.pool.block_size > full:
            self.prefix.keep(sequence.text[: sequence.num_read], sequence.table)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence whose text is finished; release its blocks."""
        self._release(sequence)
        self.sequences.remove(sequence)

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Allocate blocks for a sequence's unread tokens, at most `budget` of these; return whether enough were free."""
        begins = not sequence.table and not sequence.is_swapped
        if begins and self.prefix is not None:
            # At least the last token must be read, since the next one is chosen from its logits. If its block is cached,
            # too, this token is written to a shared block, which is copied first. With quantized blocks, a prefill cannot
            # resume within a block, so the last token's block is not taken from the cache.
            sequence.table = self.prefix.match(sequence.text[:-1] if self.rounded else sequence.text)
            found = len(sequence.table) * self.pool.block_size
            sequence.num_read = min(found, len(sequence.text) - 1)
        if not self._make_room(sequence, sequence.num_read + min(sequence.unread, budget)):
            if begins:
                self._release(sequence)
                sequence.num_read = 0
            return False
        if begins and sequence.num_read > 0:
            self._plan.hits.append((sequence, sequence.num_read))
        if sequence.is_swapped:
            sequence.is_swapped = False
            self._plan.restored.append(sequence)
        return True

    def _make_room(self, sequence: Sequence, end: int, preempt: bool = True) -> bool:
        """Allocate blocks for tokens num_read ... end - 1, and replace shared blocks among these by copies.

        If there are too few blocks, take none and return False.
        """
        first = sequence.num_read // self.pool.block_size
        while True:
            shared = [i for i, b in enumerate(sequence.table) if i >= first and self.pool.holders[b] > 1]
            new = max(0, blocks_for(end, self.pool.block_size) - len(sequence.table))
            if len(shared) + new <= self.pool.num_free:
                break
            if not (
                (self.prefix is not None and self.prefix.evict())
                or (preempt and self._preempt_one_after(sequence))
                or any(self.prefix is not None and self.prefix.forget(sequence.table[i]) for i in shared)
            ):
                return False
        for i in shared:
            source, sequence.table[i] = sequence.table[i], self.pool.allocate()
            self._plan.copies.append((source, sequence.table[i]))
            self.pool.release(source)
        sequence.table += [self.pool.allocate() for _ in range(new)]
        return True

    def _room_for_drafts(self, sequence: Sequence, most: int) -> int:
        """Return how many drafts the sequence can verify without a preemption, and take blocks for them."""
        num_drafts = max(0, min(most, sequence.max_drafts))
        end = len(sequence.text) + num_drafts
        return num_drafts if num_drafts and self._make_room(sequence, end, preempt=False) else 0

    def _preempt_one_after(self, sequence: Sequence) -> bool:
        """Preempt the last sequence after this one that is in no step; return whether there was one."""
        reading = {read.sequence.number for read in self._plan.reads}
        for victim in reversed(self.sequences):
            if victim is sequence:
                return False
            if victim.table and victim.number not in reading and not victim.is_under_way:
                self._plan.preempted.append((victim, list(victim.table)))
                self._release(victim)
                victim.is_swapped = self.swap
                victim.num_read = victim.num_read if self.swap else 0
                return True
        return False

    def _release(self, sequence: Sequence, keep: int = 0) -> None:
        for block in sequence.table[keep:]:
            self.pool.release(block)
        del sequence.table[keep:]
