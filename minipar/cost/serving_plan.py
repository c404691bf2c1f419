"""The serving planner: how many replicas, each on how many GPUs, serve a rate of requests within two latency targets.

A replica is tp GPUs of one node with all weights. Requests of P prompt tokens and N new ones arrive at `rate` per second. A
decode step for B requests takes t(B) seconds (serving.py), with B * (P + N / 2) tokens in the KV cache on average; the
prefill of a prompt takes T seconds. Prefill and decode share the replica's time:

    token    t(B) / (1 - rate * T)            seconds per output token: the share rate * T goes to prefill
    batch    B = rate * N * token             Little's law
    rate     1 / (T + N t(B) / B)             from both: the rate that a batch of B sustains; it grows with B
    first    S + rate S^2 / (2 (1 - rate S))  seconds to the first token, where S = T + ceil(P / piece) * t(B)

The last line is an M/D/1 queue: requests arrive at random, and each prompt occupies the head of the queue for S seconds,
since a step prefills one piece of one prompt while it decodes. A replica may get 80 % of the rate that its largest batch
sustains, and its queue of prompts may be busy 80 % of the time; closer to 1, batch and queue grow without bound.

With separate replicas for prefill and decode, a prefill replica has only the terms with T, a decode replica only those with
t(B); prompts are not cut into pieces, and prefill replicas send the KV cache to decode replicas.

Left out: the spread of lengths and batches (so these are means, not a service's P99); prefix hits, speculation and
preemption; kernel launches and sampling; pp, cp and ep; memory for activations.
Source: Little, 1961; the wait of M/D/1 is Pollaczek's and Khinchine's. DistServe, arXiv:2401.09670, section 3, uses the
same queue for prompts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from minipar.cost.machines import Machine
from minipar.cost.models import ModelShape
from minipar.cost.serving import (
    ALL_REDUCES,
    SIXTEEN,
    Bits,
    StepTime,
    decode_time,
    in_a_run,
    most_requests,
    prefill_time,
    rank_weight_bytes,
    rows_where_arithmetic_begins,
    stored_bytes,
    transfer_s,
)
from minipar.support.errors import one_of, require_positive

GB, MS = 1e9, 1e3
MOST_BUSY = 0.8
SHORTER = (SIXTEEN, Bits(8, 16), Bits(8, 8), Bits(4, 8))  # tried in addition to the requested bits
Role = Literal["both", "prompts", "tokens"]


@dataclass(frozen=True)
class ServingJob:
    """The requested service: the model, the GPUs, the requests and the targets.

    first_token_s, token_s  targets: seconds to the first token, and per output token
    piece                   maximum number of prompt tokens that a step prefills in addition to its decoding
    all_reduce              "ring" or "direct", for the decode steps
    """

    shape: ModelShape
    machine: Machine
    prompt_tokens: int
    new_tokens: int
    requests_per_s: float
    first_token_s: float
    token_s: float
    bits: Bits = SIXTEEN
    piece: int = 512
    all_reduce: str = "ring"

    def __post_init__(self) -> None:
        require_positive(prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens, piece=self.piece)
        for name in ("requests_per_s", "first_token_s", "token_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}; use a finite number above 0")
        if self.all_reduce not in ALL_REDUCES:
            raise ValueError(f"all_reduce={self.all_reduce!r} is unknown; use {one_of(ALL_REDUCES)}")
        for bits in self.bits:
            stored_bytes(bits)

    @property
    def request_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens

    @cached_property
    def reached(self) -> Machine:
        return in_a_run(self.machine)


class Load(NamedTuple):
    """A replica's steady state at a given rate of requests.

    batch          mean number of requests in decode
    first_token_s  seconds from arrival to the first token, including the wait in the queue
    token_s        seconds per output token
    longest_s      seconds of a step that also prefills a piece of a prompt: the longest wait between two tokens
    """

    requests_per_s: float
    batch: float
    first_token_s: float
    token_s: float
    longest_s: float


@dataclass(frozen=True)
class Replica:
    """tp GPUs that prefill prompts, decode tokens, or do both (`role`)."""

    job: ServingJob
    tp: int
    role: Role = "both"

    @cached_property
    def fits(self) -> int:
        """The number of requests that fit in memory with the weights: at full length, or only prompts for prefill."""
        job = self.job
        tokens = job.prompt_tokens if self.role == "prompts" else job.request_tokens
        return most_requests(job.shape, job.machine, tokens, self.tp, job.bits)

    @cached_property
    def prompt(self) -> StepTime:
        return prefill_time(self.job.shape, self.job.reached, self.job.prompt_tokens, self.tp, self.job.bits)

    @property
    def prompt_s(self) -> float:
        return 0.0 if self.role == "tokens" else self.prompt.step_s

    def step(self, batch: int) -> StepTime:
        """Return the time of a decode step in which each request has half of its new tokens."""
        job = self.job
        context = job.prompt_tokens + job.new_tokens // 2
        return decode_time(job.shape, job.reached, batch, context, self.tp, job.bits, job.all_reduce)

    def step_s(self, batch: int) -> float:
        return 0.0 if self.role == "prompts" else self.step(batch).step_s

    def sustained(self, batch: int) -> float:
        """Return the requests per second that keep the batch at this size while the replica is never idle."""
        return 1 / (self.prompt_s + self.job.new_tokens * self.step_s(batch) / batch)

    def batch_at(self, rate: float) -> int:
        """Return the smallest batch that sustains the rate, but at most the largest that fits."""
        return 1 + bisect_left(range(1, self.fits), rate, key=self.sustained)

    def load(self, rate: float) -> Load | None:
        """Return the steady state at a rate; None if the replica would be busier than MOST_BUSY."""
        if not self.fits or rate > MOST_BUSY * self.sustained(self.fits):
            return None
        job, step_s = self.job, self.step_s(self.batch_at(rate))
        pieces = math.ceil(job.prompt_tokens / job.piece)
        service_s = self.prompt_s + pieces * step_s
        busy = 0.0 if self.role == "tokens" else rate * service_s
        if busy > MOST_BUSY:
            return None
        token_s = step_s / (1 - rate * self.prompt_s)
        return Load(
            rate,
            batch=rate * job.new_tokens * token_s,
            first_token_s=0.0 if self.role == "tokens" else service_s + busy * service_s / (2 * (1 - busy)),
            token_s=token_s,
            longest_s=step_s + self.prompt_s / pieces,
        )

    def meets_targets(self, rate: float) -> bool:
        load = self.load(rate)
        return (
            load is not None
            and load.first_token_s <= self.job.first_token_s
            and load.token_s <= self.job.token_s
        )

    @cached_property
    def most_per_s(self) -> float:
        """The requests per second that this replica serves within the targets; 0 if even one request misses them."""
        if not self.fits:
            return 0.0
        low, high = 0.0, self.sustained(self.fits)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.meets_targets(middle) else (low, middle)
        return low if low > 1e-9 * self.sustained(1) else 0.0


class Service(NamedTuple):
    """Identical replicas that share the rate of requests equally, and the load of each."""

    replica: Replica
    replicas: int
    load: Load

    @property
    def gpus(self) -> int:
        return self.replicas * self.replica.tp

    @property
    def step(self) -> StepTime:
        return self.replica.step(self.replica.batch_at(self.load.requests_per_s))


class Apart(NamedTuple):
    """Disaggregated serving: prefill replicas and decode replicas.

    transfer_s  seconds to send a prompt's KV cache, between the first token and the second
    """

    prompts: Service
    tokens: Service
    transfer_s: float

    @property
    def gpus(self) -> int:
        return self.prompts.gpus + self.tokens.gpus


class ServingPlan(NamedTuple):
    """The services that meet the targets, by number of GPUs and then time per token, and why each tp but the first lost."""

    job: ServingJob
    services: list[Service]
    why_not: dict[int, str]
    apart: Apart | None


def plan_serving(job: ServingJob) -> ServingPlan:
    """Plan replicas of 1, 2, 4 ... GPUs, at most one node. If nothing meets the targets, `services` is empty."""
    services = sorted(_services(job), key=lambda s: (s.gpus, s.load.token_s))
    found = {service.replica.tp for service in services}
    why_not = {tp: why for tp in tensor_parallel_sizes(job) if tp not in found for why in [_why_not(job, tp)]}
    for service in services[1:]:
        why_not[service.replica.tp] = _why_not_best(service, services[0])
    return ServingPlan(job, services, dict(sorted(why_not.items())), _apart(job))


def with_fewer_bits(job: ServingJob) -> list[tuple[Bits, ServingPlan]]:
    """Return the plans with the requested bits, and with each of SHORTER."""
    every = dict.fromkeys((job.bits, *SHORTER))
    return [(bits, plan_serving(replace(job, bits=bits))) for bits in every]


def tensor_parallel_sizes(job: ServingJob) -> list[int]:
    return [2**k for k in range(job.machine.gpus_per_node.bit_length())]


def _services(job: ServingJob, role: Role = "both") -> Iterator[Service]:
    for tp in tensor_parallel_sizes(job):
        if job.shape.num_heads % tp:
            continue
        replica = Replica(job, tp, role)
        if replica.most_per_s:
            replicas = math.ceil(job.requests_per_s / replica.most_per_s)
            load = replica.load(job.requests_per_s / replicas)
            assert load is not None
            yield Service(replica, replicas, load)


def _apart(job: ServingJob) -> Apart | None:
    """Return the prefill and decode replicas with the fewest GPUs; None if either kind cannot meet its target."""
    sides = []
    for role in ("prompts", "tokens"):
        services = sorted(_services(job, role), key=lambda s: (s.gpus, s.load.token_s + s.load.first_token_s))
        if not services:
            return None
        sides.append(services[0])
    prompts, tokens = sides
    tp = min(prompts.replica.tp, tokens.replica.tp)
    sending_s = transfer_s(job.shape, job.reached, job.prompt_tokens, tp, job.bits.cache)
    return Apart(prompts, tokens, sending_s)


def _why_not(job: ServingJob, tp: int) -> str:
    if job.shape.num_heads % tp:
        return f"tp={tp} does not divide num_heads={job.shape.num_heads}"
    replica = Replica(job, tp)
    weights = rank_weight_bytes(job.shape, tp, job.bits.weights)
    usable = job.machine.memory_bytes - job.machine.context_bytes
    if weights > usable:
        return f"weights take {weights / GB:.1f} GB of each GPU, which has {usable / GB:.1f}"
    if not replica.fits:
        left = usable - weights
        return (
            f"no request of {job.request_tokens:,} tokens fits in the {left / GB:.1f} GB beside the weights"
        )
    alone = replica.step(1)
    if alone.step_s > job.token_s:
        return f"a token takes {MS * alone.step_s:.1f} ms for one request alone, bound by {alone.bound}"
    service_s = replica.prompt_s + math.ceil(job.prompt_tokens / job.piece) * alone.step_s
    return f"a prompt of {job.prompt_tokens:,} tokens takes {service_s:.2f} s without any queue"


def _why_not_best(service: Service, best: Service) -> str:
    replica, winner = service.replica, best.replica
    extra = service.gpus - best.gpus
    more = f"{extra:,} GPU{'s' if extra > 1 else ''} more"
    if not extra:
        return f"as many GPUs, and {MS * (service.load.token_s - best.load.token_s):.1f} ms more a token"
    if service.replicas == 1:
        return f"{more}: one replica could serve {replica.most_per_s:.1f} requests/s, more than is asked for"
    return (
        f"{more}: a GPU serves at most {replica.most_per_s / replica.tp:.2f} requests/s, with tp={winner.tp} "
        f"{winner.most_per_s / winner.tp:.2f}; most of a step's time goes to {service.step.bound}"
    )


# The text of `minipar plan --serve` --------------------------------------------------------------------------------------

LEGEND = (
    "batch, tokens/s: of a replica. fits: requests at full length. first, token: mean time to the first token, with its",
    "queue, and per output token. longest: a step that also reads a piece of a prompt. at most: requests/s in the targets",
)
LEFT_OUT = (
    "left out: the spread of lengths and batches (these are means, not a P99), prefix hits, speculation, preemptions,\n"
    "launches of kernels, memory of activations, reading 8 and 4 bits back. Published 70B decodes in 16 bits are met\n"
    "within 20 %; a published 7B server takes up to twice as long"
)


def serving_headline(job: ServingJob) -> str:
    """Describe the job in two lines."""
    shape, bits = job.shape, job.bits
    return (
        f"{shape.name} ({shape.num_params / 1e9:.3g} B parameters) on {job.machine.name}, weights of {bits.weights} bits, "
        f"cache of {bits.cache}\n"
        f"{job.requests_per_s:g} requests/s of {job.prompt_tokens:,} + {job.new_tokens:,} tokens; targets: first token "
        f"within {job.first_token_s:g} s, {MS * job.token_s:g} ms a token"
    )


def no_service(plan: ServingPlan) -> str:
    """Say in one line why no tp meets the targets."""
    tp, why = max(plan.why_not.items())
    return f"{plan.job.shape.name} on {plan.job.machine.name}: no tp meets the targets; tp={tp}: {why}"


def serving_text(plan: ServingPlan, shorter: list[tuple[Bits, ServingPlan]]) -> str:
    """Return the report as text.

    It shows the services that meet the targets, the parts of the best one's decode step, why every other tp fails or is
    worse, the plans with weights and cache in fewer bits, and disaggregated prefill.
    """
    header = (
        f"{'tp':>4} {'replicas':>8} {'GPUs':>5} {'batch':>6} {'fits':>6} {'first':>8} {'token':>8} {'longest':>8} "
        f"{'tokens/s':>9} {'at most':>10}"
    )
    lines = [serving_headline(plan.job), ""]
    if plan.services:
        lines += [header, *map(_row, plan.services), "", *LEGEND, "", *_step_lines(plan.services[0]), ""]
        lines += [f"why the others lost to tp={plan.services[0].replica.tp}"]
    else:
        lines += ["no tp meets the targets"]
    lines += [f"  tp={tp}".ljust(8) + why for tp, why in plan.why_not.items()]
    lines += ["", "fewer bits: GPUs, and the requests that fit in a replica", *map(_bits_row, shorter)]
    lines += ["", *_apart_lines(plan), "", LEFT_OUT]
    return "\n".join(lines)


def _row(service: Service) -> str:
    load, replica = service.load, service.replica
    tokens_per_s = load.requests_per_s * replica.job.new_tokens
    return (
        f"{replica.tp:4} {service.replicas:8,} {service.gpus:5,} {load.batch:6.1f} {replica.fits:6,} "
        f"{load.first_token_s:6.2f} s {MS * load.token_s:5.1f} ms {MS * load.longest_s:5.1f} ms {tokens_per_s:9,.0f} "
        f"{replica.most_per_s:8.2f}/s"
    )


def _step_lines(service: Service) -> list[str]:
    """Return each part of a decode step with its formula."""
    replica, step = service.replica, service.step
    job, batch = replica.job, replica.batch_at(service.load.requests_per_s)
    context = job.prompt_tokens + job.new_tokens // 2
    rows = rows_where_arithmetic_begins(
        job.reached, rank_weight_bytes(job.shape, 1, job.bits.weights) / job.shape.num_params
    )
    tp = f"2 L all-reduces of B D, {job.all_reduce}" if replica.tp > 1 else "one rank sends nothing"
    parts = [
        ("weights are read in", step.weights_s, "P e / (tp bandwidth)"),
        ("cache is read in", step.cache_s, "B S 2 L h_kv d e / (tp bandwidth)"),
        (
            "arithmetic takes",
            step.arithmetic_s,
            f"2 P B / (tp rate); longer than reading weights from {rows:.0f} rows on",
        ),
        ("tp waits", step.messages_s, tp),
    ]
    prompt, share = replica.prompt, service.load.requests_per_s * replica.prompt_s
    return [
        f"a step of tp={replica.tp}, B = {batch} requests at S = {context:,} tokens: {MS * step.step_s:.1f} ms, most of it "
        f"{step.bound}",
        *(f"  {name:20} {MS * seconds:7.2f} ms   {formula}" for name, seconds, formula in parts),
        f"a prompt: {MS * prompt.step_s:.1f} ms, {MS * prompt.messages_s:.1f} of it messages; "
        f"prompts take {share:.0%} of the time, which tokens wait for",
    ]


def _bits_row(found: tuple[Bits, ServingPlan]) -> str:
    bits, plan = found
    name = f"  weights {bits.weights:2}, cache {bits.cache:2}   "
    if not plan.services:
        return name + "no tp meets the targets"
    best = plan.services[0]
    return name + f"{_gpus(best.gpus):>7} as {_group(best)}, {best.replica.fits:,} fit"


def _apart_lines(plan: ServingPlan) -> list[str]:
    apart = plan.apart
    if apart is None:
        return ["prefill and decode apart: one of the two misses its target alone, so this would not help"]
    prompts, tokens = apart.prompts, apart.tokens
    lines = [
        f"prefill and decode apart: {_group(prompts)} read prompts, {_group(tokens)} write tokens",
        f"  first token {prompts.load.first_token_s:.2f} s, {MS * tokens.load.token_s:.1f} ms a token, "
        f"the longest step {MS * tokens.load.longest_s:.1f} ms; a request's cache is sent in "
        f"{MS * apart.transfer_s:.1f} ms, before its second token",
    ]
    return [*lines, f"  {_verdict(plan, apart)}"]


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number:,} GPUs"


def _group(service: Service) -> str:
    return f"{service.replicas} x tp={service.replica.tp}"


def _verdict(plan: ServingPlan, apart: Apart) -> str:
    if not plan.services:
        return f"helps: {_gpus(apart.gpus)} meet the targets, which no replica that does both meets"
    together = plan.services[0]
    if apart.gpus < together.gpus:
        return f"helps: {_gpus(apart.gpus)} instead of {together.gpus}"
    steadier = MS * (together.load.longest_s - apart.tokens.load.longest_s)
    return (
        f"does not save GPUs, {_gpus(apart.gpus)} against {together.gpus}; the longest wait between two tokens is "
        f"{steadier:.1f} ms shorter"
    )


def serving_json(plan: ServingPlan, shorter: list[tuple[Bits, ServingPlan]]) -> dict[str, Any]:
    """Return the plan as plain values, in seconds and bytes."""
    apart = plan.apart
    return {
        "job": serving_headline(plan.job),
        "services": [_entry(s) for s in plan.services],
        "why_not": {str(tp): why for tp, why in plan.why_not.items()},
        "bits": [
            bits._asdict() | {"gpus": p.services[0].gpus if p.services else None} for bits, p in shorter
        ],
        "apart": apart
        and {
            "gpus": apart.gpus,
            "prompts": _entry(apart.prompts),
            "tokens": _entry(apart.tokens),
            "transfer_s": apart.transfer_s,
        },
    }


def _entry(service: Service) -> dict[str, Any]:
    replica, step = service.replica, service.step
    return {
        "tp": replica.tp,
        "replicas": service.replicas,
        "gpus": service.gpus,
        "fits": replica.fits,
        "most_requests_per_s": replica.most_per_s,
        "prompt_s": replica.prompt_s,
        **service.load._asdict(),
        "step": vars(step),
        "bound": step.bound,
    }
