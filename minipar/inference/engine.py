"""The engine: requests in, texts out, one step after another.

    arrivals -> Scheduler.plan -> save, copy, load blocks -> forward of the model -> choose tokens -> Scheduler.advance
                begin                                                                end

On a mesh of tp x pp x cp ranks every rank runs this same loop on the same requests. The scheduler sees only counts, so all
ranks make the same plans and the same tables without a message. The tp ranks of a stage compute its layers together, the
stages compute one after another, and one rank chooses the tokens and broadcasts them. Up to pp steps are in flight at once,
each for different requests (`rotation.py`); every rank begins and ends the same steps in the same order. The cp ranks
split the tokens of every text among themselves (`split_keys.py`), and the ep ranks split the experts (`expert_shares.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Literal

import torch
from torch import Tensor

from minipar.config.model_config import ModelConfig
from minipar.inference.blocks import BlockPool, Rows
from minipar.inference.events import Event, Kind, StepCounts
from minipar.inference.paged_model import PagedModel
from minipar.inference.policy import find_policy
from minipar.inference.prefix import PrefixCache
from minipar.inference.quantized_weights import quantize_weights
from minipar.inference.request import Request, check_request, distribution
from minipar.inference.rotation import StageClock
from minipar.inference.scheduler import Plan, Read, Scheduler, Sequence, check_blocks
from minipar.inference.speculative import DRAWS, RULES, Draft, Guess, KeyedDice, check_draft
from minipar.inference.stages import Answer, Stages
from minipar.inference.streamed_weights import check_streaming, stream_weights
from minipar.mesh import Mesh
from minipar.model.sampling import NOT_FINITE, NotFinite, likeliest_tokens
from minipar.model.transformer import Transformer
from minipar.support.errors import one_of, require_positive

NO_TOKEN = -1


@dataclass(frozen=True)
class Options:
    """Options of an engine. Only cache_bits, weight_bits, and rule="rejection" with sampling change the generated text.

    block_size     tokens per block of the cache; under cp, a multiple of cp
    num_blocks     blocks of the cache, for all requests together
    token_budget   maximum number of tokens in a step; prompts are prefilled in pieces that fit the budget left by decodes
    max_running    maximum number of requests in a step
    policy         which request goes first: "first-come", "shortest-remaining" or "multi-level-feedback"
    prefix_cache   keep blocks of a run's earlier texts for its requests with a common prefix
    preemption     what happens to the blocks that a request loses: "recompute" them later, or "swap" them to CPU memory
    draft          None, or the draft that guesses tokens to be verified
    num_drafts     maximum number of guesses per request in a step
    rule           when a guess is accepted: "same text" or "rejection"; see speculative.py
    cache_bits     None, or 8, 4 or 2: keys and values of full blocks are quantized to this many bits. The text changes,
                   and depends on block_size, but is the same in every batch
    cache_group    number of features of a value that share a min and a step; all features of a head, if it has fewer
    weight_bits    None, or 8 or 4: the layers' weights are quantized to this many bits, in place. The text changes, but
                   is the same in every batch and on every mesh
    weight_group   with 4 bits, the number of inputs that share a scale
    offload        "none", or the choice of `--offload` that stores the layers; see streamed_weights.py
    offload_folder for "disk": the folder of the file; None: the system's folder for temporary files
    one_by_one     run each token in a forward of its own: bitwise equal in every batch, but slower; see paged_model.py
    """

    block_size: int = 16
    num_blocks: int = 256
    token_budget: int = 256
    max_running: int = 64
    policy: str = "first-come"
    prefix_cache: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"
    draft: Draft | None = None
    num_drafts: int = 4
    rule: str = "same text"
    cache_bits: int | None = None
    cache_group: int = 64
    weight_bits: int | None = None
    weight_group: int = 64
    offload: str = "none"
    offload_folder: str | None = None
    one_by_one: bool = False

    def __post_init__(self) -> None:
        require_positive(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            token_budget=self.token_budget,
            max_running=self.max_running,
            num_drafts=self.num_drafts,
        )
        find_policy(self.policy)
        check_streaming(self.offload, self.offload_folder)
        if self.preemption not in ("recompute", "swap"):
            raise ValueError(f"preemption={self.preemption!r} is unknown; use recompute or swap")
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r} is unknown; use {one_of(RULES)}")


@dataclass
class Result:
    """A request's answer.

    tokens  the new tokens, without the prompt
    error   why the request was refused, or could not be continued after these tokens, in one line; None if it was served
    """

    tokens: list[int] = field(default_factory=list)
    error: str | None = None


Results = Items[Result] | Mapping[int, Result]  # results by the number of the request


# (tokens of a step, its measured seconds) -> the time of the step. In virtual time each stage takes an equal part of it.
Duration = Callable[[int, float], float]


def one_second(num_tokens: int, measured_s: float) -> float:
    """Return 1: time is counted in steps, so the log is the same on every machine."""
    return 1.0


def as_measured(num_tokens: int, measured_s: float) -> float:
    """Return the time measured on the choosing rank: since the previous step's tokens or, if later, this step's start."""
    return measured_s


@dataclass
class Step:
    """A step in flight.

    ready_s  the time at which it was planned
    answer   for each read that writes, its new tokens: [reads that write, num_drafts + 1], padded with NO_TOKEN
    """

    plan: Plan
    ready_s: float
    answer: Answer


def refusal(request: Request, config: ModelConfig, options: Options) -> str | None:
    """Return why an engine with these options cannot serve the request; None if it can. Needs no engine."""
    try:
        check_request(request, config)
        check_blocks(request, options.num_blocks, options.block_size)
    except ValueError as error:
        return str(error)
    return None


def scheduler_of(options: Options, num_groups: int = 1) -> Scheduler:
    """Return a scheduler with these options, and blocks of its own."""
    pool = BlockPool(options.num_blocks, options.block_size)
    return Scheduler(
        pool,
        find_policy(options.policy),
        options.token_budget,
        options.max_running,
        PrefixCache(pool) if options.prefix_cache else None,
        options.num_drafts if options.draft is not None else 0,
        swap=options.preemption == "swap",
        rounded=options.cache_bits is not None,
        num_groups=num_groups,
    )


def _rows_of(read: Read) -> Rows:
    """Return the rows of a sequence: its unread tokens of this step, then the guesses to be verified."""
    s = read.sequence
    tokens = [*s.text[s.num_read : s.num_read + read.count], *(guess.token for guess in read.guesses)]
    return Rows(tokens, s.num_read, s.table, len(read.guesses) + 1 if read.writes else 0)


class Engine:
    """Serves requests with one model.

    model     the whole model; on a mesh, this rank's stage, split over tp, and by `expert_parallel` over ep
    mesh      None, or the mesh of tp x pp x cp ranks; every rank makes an engine and calls `run` with the same requests.
              The ep ranks are among the cp ranks, or, if cp is 1, hold the same cache: Mesh(dp=n, ep=n)
    duration  the time that a step takes; if it uses the measured time, all ranks use that of the rank that chooses tokens

    Raises ValueError if the model's keys and values cannot be cached, the weights cannot be quantized in such groups, the
    draft has another vocabulary, cp does not divide the block size, or the experts are not split over the ep ranks.
    """

    def __init__(
        self,
        model: Transformer,
        options: Options | None = None,
        mesh: Mesh | None = None,
        duration: Duration = one_second,
    ):
        self.options = options = options or Options()
        if options.weight_bits is not None:
            tp = None if mesh is None else mesh.comm("tp")
            quantize_weights(model, options.weight_bits, options.weight_group, tp)
        stream_weights(model, options.offload, options.offload_folder)
        self.num_stages = 1 if mesh is None else mesh.sizes["pp"]
        # This many steps in flight at once keep every stage busy.
        self.scheduler = scheduler_of(options, num_groups=self.num_stages)
        self.pool, self.prefix = self.scheduler.pool, self.scheduler.prefix
        self.paged = PagedModel(
            model, self.pool, options.one_by_one, options.cache_bits, options.cache_group, mesh
        )
        self.stages = Stages(self.paged, mesh)
        self.config, self.duration = model.config, duration
        if options.draft is not None:
            check_draft(options.draft, model.config.vocab_size)
        self.events: list[Event] = []
        self.steps: list[StepCounts] = []
        self._saved: dict[int, list[list[Tensor]]] = {}
        self.now_s = 0.0

    def run(self, requests: Items[Request]) -> list[Result]:
        """Serve these requests; return their results in order. If one cannot be served, its result has an error.

        A request whose logits have nan or inf ends there, with an error; the others are served.
        """
        results = [Result() for _ in requests]
        for _ in self.iterate(requests, results):
            pass
        return results

    def iterate(
        self, requests: Items[Request], results: Results, more: Callable[[], bool] = lambda: False
    ) -> Iterator[Plan]:
        """Serve requests step by step: fill in `results`, and yield each step's plan once the step is done.

        more  called before each step, on every rank: it may `add` and `cancel` requests, the same ones on every rank, and
              returns whether more requests may still arrive
        """
        if self.scheduler.sequences:
            raise RuntimeError(
                "another iterate of this engine is open; use it up, or close it, before the next"
            )
        self.events, self.steps, self.now_s = [], [], 0.0
        if self.prefix is not None:
            self.prefix.clear()  # the weights may have changed since the last run
        scheduler, self._clock = self.scheduler, StageClock(self.num_stages)
        under_way: deque[Step] = deque()
        coming = sorted(enumerate(requests), key=lambda item: item[1].arrival_s)
        try:
            while more() or coming or scheduler.sequences or under_way:
                if coming and not scheduler.sequences:
                    self.now_s = max(self.now_s, coming[0][1].arrival_s)
                while coming and coming[0][1].arrival_s <= self.now_s:
                    self.add(*coming.pop(0), results)
                while len(under_way) < scheduler.num_groups and (step := self._begin(len(under_way))):
                    under_way.append(step)
                if under_way:
                    yield self._end(under_way.popleft(), results)
        except GeneratorExit:  # all ranks stop here; this one still receives the messages sent to it
            for step in under_way:
                step.answer.wait()
            raise
        finally:  # after an early stop or an error, no block may stay taken
            for sequence in list(scheduler.sequences):
                scheduler.remove(sequence)
            self._saved.clear()

    def ended(self, requests: Items[Request], results: Results) -> Iterator[int]:
        """Serve these requests like `iterate`; yield the number of each as soon as it is finished or refused, or fails."""
        told = 0
        for _ in chain(self.iterate(requests, results), [None]):  # a refusal may come after the last step
            for event in self.events[told:]:
                if event.kind in (Kind.FINISH, Kind.FAIL, Kind.REFUSE):
                    yield event.number
            told = len(self.events)

    def add(self, number: int, request: Request, results: Results) -> None:
        """Queue a request that has arrived; if it cannot be served, its result says why."""
        results[number].error = refusal(request, self.config, self.options)
        kind = Kind.ARRIVE if results[number].error is None else Kind.REFUSE
        if kind == Kind.ARRIVE:
            self.scheduler.add(Sequence.of(number, request))
        self._note(kind, number, len(request.prompt), request.arrival_s)

    def cancel(self, number: int) -> None:
        """Forget a request, and release its blocks; nothing happens if it is finished already."""
        for sequence in self.scheduler.sequences:
            if sequence.number == number:
                self.scheduler.remove(sequence)
                self._saved.pop(number, None)
                count = len(sequence.text) - len(sequence.request.prompt)
                self._note(Kind.CANCEL, number, count)
                return

    def _begin(self, num_under_way: int) -> Step | None:
        """Plan a step and compute this rank's part of it; return None if no request can run until another step ends."""
        started = time.perf_counter()
        plan = self.scheduler.plan(num_under_way)
        self._move_blocks(plan)
        for sequence, _ in plan.preempted:
            self._note(Kind.PREEMPT, sequence.number)
        if not plan.reads:
            return None
        self._guess(plan)
        answer = self.stages.tell(self._read(plan), time.perf_counter() - started)
        return Step(plan, self.now_s, answer)

    def _end(self, step: Step, results: Results) -> Plan:
        """Wait for a step's tokens, and append them to its requests."""
        plan, scheduler = step.plan, self.scheduler
        chosen, measured_s = step.answer.wait()
        rows = iter(chosen.tolist())
        num_tokens = sum(read.count + len(read.guesses) for read in plan.reads)
        begin, self.now_s = self._clock.run(step.ready_s, self._stage_seconds(num_tokens, measured_s))
        held = {block for s in scheduler.sequences for block in s.table}
        waiting = sum(not s.table for s in scheduler.sequences)
        prefixes = self.pool.num_blocks - self.pool.num_free - len(held)
        self.steps.append(StepCounts(begin, self.now_s, num_tokens, len(held), prefixes, waiting))
        self._log(plan, begin)
        for read in plan.reads:
            sequence = read.sequence
            written = [token for token in next(rows) if token != NO_TOKEN] if read.writes else []
            if sequence not in scheduler.sequences:
                continue  # it was cancelled while the step was in flight
            ends_here = written == [NOT_FINITE]
            if ends_here and read.guesses:
                # A guess may have brought the nan: attention multiplies what it masks by 0, and 0 * nan = nan. So the
                # request's own token is read again, alone.
                sequence.takes_guesses = False
                scheduler.advance(sequence, 0)
                continue
            result = results[sequence.number]
            if ends_here:
                self._write(read, [])
                result.error = str(NotFinite())
            else:
                self._write(read, written)
                result.tokens += written
            if ends_here or (written and sequence.request.is_finished_by(sequence.text)):
                self._retire(sequence, written[-1])
                self._note(Kind.FAIL if ends_here else Kind.FINISH, sequence.number, len(result.tokens))
        return plan

    def _stage_seconds(self, num_tokens: int, measured_s: float) -> list[float]:
        """Return a step's time in each stage. A measured time is the last stage's, from the end of the previous step."""
        seconds = self.duration(num_tokens, measured_s)
        if self.duration is as_measured:
            return [0.0] * (self.num_stages - 1) + [seconds]
        return [seconds / self.num_stages] * self.num_stages

    def _retire(self, sequence: Sequence, last: int) -> None:
        """Forget a sequence whose text ends with the token `last`, or, for NOT_FINITE, cannot be continued."""
        self.scheduler.remove(sequence)
        if last == NOT_FINITE and self.prefix is not None:
            self.prefix.clear()  # its blocks may have nan also where the text of another request would have none

    def _move_blocks(self, plan: Plan) -> None:
        if self.options.preemption == "swap":
            for sequence, table in plan.preempted:
                self._saved[sequence.number] = self.paged.save(table)
        for source, destination in plan.copies:
            self.paged.copy_block(source, destination)
        for sequence in plan.restored:
            self.paged.load(sequence.table, self._saved.pop(sequence.number))

    def _guess(self, plan: Plan) -> None:
        """Guess tokens for each read with drafts; on a mesh, every rank makes the same guesses."""
        draft, draws = self.options.draft, DRAWS[self.options.rule]
        for read in plan.reads:
            if draft is not None and read.num_drafts:
                sequence = read.sequence
                read.guesses = draft.guess(sequence.text, sequence.request, read.num_drafts, draws)

    def _read(self, plan: Plan) -> Tensor:
        """Run this rank's part of the model; return the new tokens of each sequence that has no unprocessed tokens left.

        Returns `Step.answer`'s tokens. Only the rank that chooses tokens has them; the other ranks return padding.
        """
        rows = [_rows_of(read) for read in plan.reads]
        logits, width = self.stages.logits(rows), self.options.num_drafts + 1
        ends = list(accumulate(len(row.tokens) for row in rows))
        chosen: list[list[int]] = []
        likeliest: dict[int, int] = {}
        if logits is not None and self.stages.chooses:
            greedy = [end - 1 for read, end in zip(plan.reads, ends) if read.takes_likeliest]
            likeliest = dict(zip(greedy, likeliest_tokens(logits[greedy]).tolist()))
        for read, row, end in zip(plan.reads, rows, ends):
            if read.writes:
                written: list[int] = []
                if logits is not None and self.stages.chooses:
                    own = logits[end - row.num_chosen : end]
                    written = self._choose(read.sequence, read.guesses, own, likeliest.get(end - 1))
                chosen.append(written + [NO_TOKEN] * (width - len(written)))
        return torch.tensor(chosen, dtype=torch.int64)

    def _choose(
        self, sequence: Sequence, guesses: list[Guess], logits: Tensor, likeliest: int | None
    ) -> list[int]:
        """Return the new tokens of a sequence, given the logits [g + 1, V] of its last token and of each guess.

        likeliest  the new token, where it was chosen already: a read from the device by request is slow

        If no token can be chosen from the logits of the last token, [NOT_FINITE].
        """
        if likeliest is not None:
            return [likeliest]
        request = sequence.request
        p: list[Tensor] = []
        # A guess after which logits have nan is looked at in the next step, if it is right.
        with suppress(NotFinite):
            for row in logits:
                p.append(distribution(row, request))
        if not p:
            return [NOT_FINITE]
        dice = KeyedDice(request.seed, begin=len(sequence.text))
        written = RULES[self.options.rule](p, guesses[: len(p) - 1], dice)
        for i, token in enumerate(written):
            if token in request.end_tokens:
                return written[: i + 1]
        return written

    def _write(self, read: Read, written: list[int]) -> None:
        """Append the chosen tokens. All but the last were accepted guesses, already in the cache; the rest are dropped."""
        sequence = read.sequence
        sequence.text += written
        right = max(0, len(written) - 1)
        self.scheduler.advance(sequence, read.count + right)
        self.paged.settle(sequence.table, sequence.num_read)
        if written:
            self._note(Kind.WRITE, sequence.number, len(written))
        if read.guesses:
            self._note(Kind.GUESSED, sequence.number, len(read.guesses))
            self._note(Kind.ACCEPTED, sequence.number, right)

    def _note(self, kind: Kind, number: int, count: int = 0, at_s: float | None = None) -> None:
        """Add the event of one moment, which is now unless told."""
        at_s = self.now_s if at_s is None else at_s
        self.events.append(Event(kind, number, at_s, at_s, count))

    def _log(self, plan: Plan, begin_s: float) -> None:
        for sequence, num_tokens in plan.hits:
            self._note(Kind.HIT, sequence.number, num_tokens, begin_s)
        for sequence in plan.restored:
            self._note(Kind.RESTORE, sequence.number, sequence.num_read, begin_s)
        for read in plan.reads:
            sequence = read.sequence
            decodes = read.writes and len(sequence.text) > len(sequence.request.prompt) and read.count == 1
            kind, count = Kind.DECODE if decodes else Kind.PREFILL, read.count + len(read.guesses)
            self.events.append(Event(kind, sequence.number, begin_s, self.now_s, count))
