"""The text of `minipar plan --serve`."""

from __future__ import annotations

from typing import Any

from minipar.cost.serving import Bits, rank_weight_bytes, rows_where_arithmetic_begins
from minipar.cost.serving_plan import Apart, Service, ServingJob, ServingPlan

GB, MS = 1e9, 1e3
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
    price = f"{_gpus(apart.gpus)} against {together.gpus}"
    if steadier > 0:
        return (
            f"does not save GPUs, {price}; the longest wait between two tokens is {steadier:.1f} ms shorter"
        )
    return f"does not help: {price}"


def serving_json(plan: ServingPlan, shorter: list[tuple[Bits, ServingPlan]]) -> dict[str, Any]:
    """Return the plan as plain values, in seconds and bytes."""
    apart = plan.apart
    return {
        "job": serving_headline(plan.job),
        "services": [_entry(s) for s in plan.services],
        "why_not": {str(tp): why for tp, why in plan.why_not.items()},
        "bits": [
            {"weights": bits.weights, "cache": bits.cache, "gpus": p.services[0].gpus if p.services else None}
            for bits, p in shorter
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
    parts = {
        "weights_s": step.weights_s,
        "cache_s": step.cache_s,
        "arithmetic_s": step.arithmetic_s,
        "messages_s": step.messages_s,
    }
    return {
        "tp": replica.tp,
        "replicas": service.replicas,
        "gpus": service.gpus,
        "fits": replica.fits,
        "most_requests_per_s": replica.most_per_s,
        "prompt_s": replica.prompt_s,
        **service.load._asdict(),
        "step": parts,
        "bound": step.bound,
    }
