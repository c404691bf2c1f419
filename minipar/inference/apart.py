"""Disaggregated serving: some ranks prefill, the other ranks decode, and each request's KV cache is sent in between.

    prefill ranks   prefill 0 | prefill 1 | prefill 2 | ...                        never wait for a decode
                          \\ cache, token  \\ cache, token
    decode ranks            decode 0 | decode 0 | decode 0 1 | decode 0 1 | ...    never wait for a long prompt

Each side is an `Engine` of its own, with its own tp and its own blocks. The prefill side serves every request up to its
first token. Then it sends the decode side that token and the request's keys and values, which the decode side loads into
its own blocks, as if they had been swapped out. The decode side may preempt a request and recompute its cache, like any
engine.

The two sides do not exchange plans. The time of a prefill depends only on the arrivals and the prompts, which all ranks
know. So every decode rank computes when each first token will come (`first_tokens`), in the prefill side's virtual time,
and receives in that order.

Costs: the weights are held twice. The bytes of a transfer are those of `transfer.py`; it overlaps with further prefills,
which wait only while `MAX_UNSENT` requests have been handed over and not yet received.
Source: DistServe, arXiv:2401.09670; Splitwise, arXiv:2311.18677.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

import torch

from minipar.comm import Comm
from minipar.comm.objects import all_gather_objects
from minipar.comm.transport.stream import Pending
from minipar.config.model_config import ModelConfig
from minipar.inference.engine import (
    Duration,
    Engine,
    Options,
    Result,
    Results,
    one_second,
    refusal,
    scheduler_of,
)
from minipar.inference.events import Event, Kind, StepCounts
from minipar.inference.request import Request
from minipar.inference.scheduler import Sequence
from minipar.inference.transfer import heads_of, recv_cache, send_cache
from minipar.mesh import Mesh
from minipar.model.sampling import NOT_FINITE, NotFinite
from minipar.model.transformer import Transformer
from minipar.support.errors import require_positive

MAX_UNSENT = 16  # requests whose caches a prefill rank keeps while the decode ranks have not received them


class Served(NamedTuple):
    """The outcome, the same on every rank: results, the log of both sides, and the steps of each."""

    results: list[Result]
    events: list[Event]
    prefill_steps: list[StepCounts]
    decode_steps: list[StepCounts]


def serve_apart(
    world: Comm,
    load: Callable[[Mesh], Transformer],
    requests: Items[Request],
    options: Options,
    prefill_tp: int = 1,
    duration: Duration = one_second,
    transfer_s: Callable[[int], float] = lambda num_tokens: 0.0,
    decode_duration: Duration | None = None,
    on_result: Callable[[int, Result], None] = lambda number, result: None,
) -> Served:
    """Serve requests: the first `prefill_tp` ranks of `world` prefill, all other ranks decode.

    load        mesh of this rank's side -> its shard of the model; every rank calls it once
    options     the options of both sides; only the decode side uses drafts
    duration    (tokens of a step, 0) -> seconds of the step; must depend on the tokens only, since every rank computes it
    transfer_s  (tokens) -> seconds between a first token and its arrival on the decode side; see cost/serving.py
    decode_duration  the decode side's own duration, which may use the measured time; None: the same as the prefill side's
    on_result   called on the first decode rank with a request's number and result, as soon as it is finished or refused

    Every rank calls this with the same arguments.
    Raises ValueError if the cache cannot be sent or no rank is left to decode.
    """
    require_positive(prefill_tp=prefill_tp, decode_tp=world.size - prefill_tp)
    prefills = world.rank < prefill_tp
    ranks = range(prefill_tp) if prefills else range(prefill_tp, world.size)
    mesh = Mesh(world.subgroup(ranks, "prefill" if prefills else "decode"), tp=len(ranks))
    model, results = load(mesh), [Result() for _ in requests]
    check_sides(model.config, options, prefill_tp, world.size - prefill_tp)
    refused = {number for number, request in enumerate(requests) if refusal(request, model.config, options)}

    def predicted(num_tokens: int, measured_s: float) -> float:
        return duration(num_tokens, 0.0)

    side: PrefillSide | DecodeSide
    if prefills:
        side = PrefillSide(model, options, mesh, predicted, world, prefill_tp)
        side.run([r if n in refused else replace(r, max_new_tokens=1) for n, r in enumerate(requests)])
        side.wait_for_sends(0)
    else:
        side = DecodeSide(model, options, mesh, decode_duration or predicted, world, prefill_tp)
        times = first_tokens(requests, options, duration, refused)
        side.coming.extend((number, len(requests[number].prompt)) for number in times)
        arrivals = transfer_ends(times, requests, transfer_s)
        arriving = [replace(request, arrival_s=time) for request, time in zip(requests, arrivals)]
        for number in side.ended(arriving, results):
            if world.rank == prefill_tp:
                on_result(number, results[number])
    logs = all_gather_objects(world, (results, side.events, side.steps))
    (_, prefill_events, prefill_steps), (results, decode_events, decode_steps) = logs[0], logs[-1]
    ends = (Kind.FINISH, Kind.FAIL, Kind.REFUSE)  # which the decode side notes, too
    events = [event for event in prefill_events if event.kind not in ends] + decode_events
    events.sort(key=lambda event: event.end_s)
    return Served(results, events, prefill_steps, decode_steps)


def transfer_ends(
    times: Mapping[int, float], requests: Items[Request], transfer_s: Callable[[int], float]
) -> list[float]:
    """Return when each request's cache arrives, if one link sends all caches in the order of their first tokens.

    A request without a time is refused: it arrives as it is.
    """
    arrivals, free_s = [request.arrival_s for request in requests], 0.0
    for number in sorted(times, key=lambda i: (times[i], i)):
        free_s = max(free_s, times[number]) + transfer_s(len(requests[number].prompt))
        arrivals[number] = free_s
    return arrivals


def check_sides(config: ModelConfig, options: Options, prefill_tp: int, decode_tp: int) -> None:
    """Raise ValueError if the cache of this model cannot be sent from prefill_tp ranks to decode_tp ranks."""
    if config.kv_latent_dim or options.cache_bits is not None:
        raise ValueError(
            "a cache that is rounded, or of latents, is not sent between ranks; serve on one side"
        )
    for tp in (prefill_tp, decode_tp):
        heads_of(0, tp, config.num_kv_heads)


def first_tokens(
    requests: Items[Request], options: Options, duration: Duration, refused: Collection[int] = ()
) -> dict[int, float]:
    """Return when the prefill side generates each request's first token, by running its schedule without a model.

    The keys are the numbers of the requests that are not refused, in the order in which their caches are sent. Times alone
    do not give that order: a time may be so large that no step increases it.
    """
    times: dict[int, float] = {}
    scheduler, now_s = scheduler_of(options), 0.0
    served = ((number, request) for number, request in enumerate(requests) if number not in refused)
    coming = sorted(served, key=lambda item: item[1].arrival_s)
    while coming or scheduler.sequences:
        if not scheduler.sequences:
            now_s = max(now_s, coming[0][1].arrival_s)
        while coming and coming[0][1].arrival_s <= now_s:
            number, request = coming.pop(0)
            scheduler.add(Sequence.of(number, replace(request, max_new_tokens=1)))
        plan = scheduler.plan()
        now_s += duration(plan.num_tokens, 0.0)
        for read in plan.reads:
            writes = read.writes
            scheduler.advance(read.sequence, read.count)
            if writes:
                scheduler.remove(read.sequence)
                times[read.sequence.number] = now_s
    return times


class Side(Engine):
    """An engine on the ranks of one side; `world` has the ranks of both sides."""

    def __init__(
        self,
        model: Transformer,
        options: Options,
        mesh: Mesh,
        duration: Duration,
        world: Comm,
        prefill_tp: int,
    ):
        super().__init__(model, options, mesh, duration)
        self.world, self.prefill_tp = world, prefill_tp
        self._unsent: deque[list[Pending]] = deque()  # for each request, its messages
        # On the decode side: the requests that the prefill side will send, in its order, as (number, tokens of the prompt),
        # and those received before they were added: number -> first token, cache.
        self.coming: deque[tuple[int, int]] = deque()
        self._received: dict[int, tuple[int, list[list[torch.Tensor]]]] = {}


class PrefillSide(Side):
    """Prefills prompts; sends each request's cache and first token to the decode ranks.

    It keeps messages in memory until the decode ranks have received them, so that prefills need not wait. This cannot
    hang: the decode ranks receive requests in the order in which they are sent.
    """

    def _retire(self, sequence: Sequence, last: int) -> None:
        """Send the sequence's first token and its cache to the decode ranks."""
        # Also NOT_FINITE is sent, and no block is forgotten for it: the decode ranks know the schedule beforehand.
        messages = []
        if self.world.rank == 0:
            for rank in range(self.prefill_tp, self.world.size):
                sent = torch.tensor([last], device=self.paged.device)
                messages.append(self.world.send(sent, rank, async_op=True))
        messages += send_cache(self.world, self.prefill_tp, self.paged, sequence.table, sequence.num_read)
        self._unsent.append(messages)
        self.scheduler.remove(sequence)
        self.wait_for_sends(MAX_UNSENT)

    def wait_for_sends(self, most: int) -> None:
        """Wait until at most `most` requests have caches that the decode ranks have not received."""
        while len(self._unsent) > most:
            for message in self._unsent.popleft():
                message.wait()


class DecodeSide(Side):
    """Decodes requests that the prefill ranks have prefilled."""

    def add(self, number: int, request: Request, results: Results) -> None:
        """Receive a request's first token and cache; queue it as if its blocks had been swapped out."""
        if refusal(request, self.config, self.options):
            return super().add(number, request, results)
        while number not in self._received:
            sent, num_tokens = self.coming.popleft()
            token = int(self.world.recv((1,), torch.int64, 0).item())
            self._received[sent] = token, recv_cache(self.world, self.prefill_tp, self.paged, num_tokens)
        token, cache = self._received.pop(number)
        if token == NOT_FINITE:
            results[number].error = str(NotFinite())
            return self._note(Kind.FAIL, number)
        self._saved[number] = cache
        sequence = Sequence(
            number, request, [*request.prompt, token], num_read=len(request.prompt), is_swapped=True
        )
        results[number].tokens.append(token)
        if request.is_finished_by(sequence.text):
            del self._saved[number]
            self._note(Kind.FINISH, number, 1)
        else:
            self.scheduler.add(sequence)
