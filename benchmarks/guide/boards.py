"""Whiteboard walkthroughs and system designs as Markdown, with code from `minipar.simple` and the planner's numbers."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from minipar.cost.collectives import sent_share
from minipar.cost.doubt import doubt
from minipar.cost.layout import Job, parse_layout
from minipar.cost.machines import find_machine
from minipar.cost.memory import worst_rank_memory
from minipar.cost.model_table import find_model
from minipar.cost.models import model_flops_per_token
from minipar.cost.plan_command import MARGIN
from minipar.cost.planner import Plan, plan
from minipar.cost.report import plan_text
from minipar.cost.serving import (
    Bits,
    cache_token_bytes,
    rank_weight_bytes,
    rows_where_arithmetic_begins,
)
from minipar.cost.serving_plan import ServingJob, plan_serving, serving_text, with_fewer_bits
from minipar.cost.timing import step_time
from minipar.learn.exercises.solution import excerpt
from minipar.learn.facts import quote

Entry = dict[str, Any]
# The parts of a spoken design, in order.
SPOKEN = dict(
    clarify="Ask first",
    paper="On paper",
    choice="Choose",
    instead="Not chosen",
    risk="Risk",
    measure="Measure",
)


def walkthroughs() -> list[Entry]:
    return _entries("walkthroughs.toml", "walkthrough")


def designs() -> list[Entry]:
    return _entries("designs.toml", "design")


def services() -> list[Entry]:
    return _entries("designs.toml", "service")


def _entries(file: str, kind: str) -> list[Entry]:
    entries: list[Entry] = tomllib.loads((files(__package__) / file).read_text(encoding="utf-8"))[kind]
    return quote(entries)


def walkthrough_page() -> str:
    parts = ["# At the whiteboard", ""]
    for board in walkthroughs():
        parts += [f"## {board['title']}", "", f"*{board['question']}*", ""]
        parts += ["**Derive.** " + " ".join(board["derive"].split()), ""]
        parts += ["**Sketch.**", "", "```", board["sketch"].strip("\n"), "```", ""]
        parts += ["**Write.**", "", "```python", *code_of(board), "```", ""]
        parts += [
            f"**Test.** {_test_of(board)}.",
            "",
            f"**Next.** {board['next']}",
            "",
        ]
    return "\n".join(parts)


def _test_of(board: Entry) -> str:
    """Name the specification that checks the code or, for code without one, link the test."""
    file, _, test = board["tests"].partition("::")
    if test:
        return f"[`{test}`](../../{file})"
    return f"`SPECIFICATIONS[{file!r}].check(...)` of `minipar.spec`"


def code_of(board: Entry) -> list[str]:
    """Return the source lines of the functions that the walkthrough shows, without the helpers that they call."""
    pieces = []
    for place in board["code"]:
        module, _, name = place.partition(":")
        pieces.append(excerpt(module, {name}, with_used=False))
    return "\n\n\n".join(pieces).splitlines()


def design_page() -> str:
    parts = ["# System designs", "", "Numbers by `minipar plan`; times are predictions.", ""]
    for design in designs():
        parts += _design(design)
    for service in services():
        parts += _service(service)
    return "\n".join(parts)


def _design(design: Entry) -> list[str]:
    machine = find_machine(design["machine"])
    job = Job(
        find_model(design["model"]), machine, design["gpus"], design["seq"], design["batch"],
        margin_bytes=MARGIN * machine.memory_bytes,
    )  # fmt: skip
    found = plan(job)
    values = design_values(job, found, design["layouts"])
    return [
        *_spoken(design, values),
        *_asked_next(design, values),
        "By `minipar plan`:",
        "",
        "```",
        plan_text(found),
        "```",
        "",
    ]


def _spoken(design: Entry, values: dict[str, float]) -> list[str]:
    parts = (
        f"**{title}.** {' '.join(design[name].format(**values).split())}\n" for name, title in SPOKEN.items()
    )
    return [f"## {design['title']}", "", *parts]


def design_values(job: Job, found: Plan, layouts: Sequence[str]) -> dict[str, float]:
    """Return the numbers that the text of a design quotes: those of the job, the plan's choice, and the named layouts."""
    shape, machine, choice = job.shape, job.machine, found.choice
    step, flops = step_time(job, choice.layout), model_flops_per_token(shape, job.seq_len)
    _, items = worst_rank_memory(job, choice.layout)
    per_gpu = flops * job.batch * job.seq_len / job.gpus
    state = 16 * shape.num_params
    values: dict[str, float] = dict(
        gpus=job.gpus, seq=job.seq_len, batch=job.batch, gpu_gb=machine.memory_bytes / 1e9, state_gb=state / 1e9,
        checkpoint_gb=14 * shape.num_params / 1e9,
        per_gpu_gb=state / job.gpus / 1e9, zero1_gb=(4 + 12 / job.gpus) * shape.num_params / 1e9,
        weights_gb=2 * shape.num_params / 1e9, tp8_pp2_gb=state / 16e9,
        tp8_pp2_zero1_gb=(4 + 12 / 4) * shape.num_params / 16e9,
        flops=per_gpu / 1e15, peak_s=per_gpu / machine.peak_flops, attention=1 - model_flops_per_token(shape, 0) / flops,
        gradients_ms=1e3 * sent_share("all_reduce", 8) * 2 * shape.num_params / machine.link_bytes_per_s,
        gpus_a_sample=job.gpus // job.batch,
        seq_16=job.seq_len // 16, seconds=choice.seconds, doubt=doubt(job, choice.layout), mfu=step.mfu,
        gb=choice.num_bytes / 1e9, near=len(found.near), activations_gb=items["activations"] / 1e9,
        activations_32k_gb=items["activations"] / job.seq_len * 32_768 / 1e9, cp=choice.layout.cp,
        dp=choice.layout.dp, pp=choice.layout.pp,
    )  # fmt: skip
    for name in layouts:
        layout = parse_layout(name)
        key = name.replace("-", "_").replace(":", "_")
        values[f"{key}_s"] = values["published_s"] = step_time(job, layout).total
        if layout.zero == 3:
            values["zero3_more"] = step_time(job, layout).total / choice.seconds - 1
            sharded = replace(job, implementation=replace(job.implementation, reduce_every="microbatch"))
            values["zero3_each_more"] = step_time(sharded, layout).total / choice.seconds - 1
        values[f"{key}_gb"] = sum(worst_rank_memory(job, layout)[1].values()) / 1e9
    return values


def _asked_next(design: Entry, values: dict[str, float]) -> list[str]:
    answers = (answer.format(**values) for answer in design["answers"])
    pairs = zip(design["asks"], answers, strict=True)
    return ["What is asked next:", "", *(f"- {question} {answer}" for question, answer in pairs), ""]


def _service(service: Entry) -> list[str]:
    job = ServingJob(
        find_model(service["model"]),
        find_machine(service["machine"]),
        *(
            service[name]
            for name in ("prompt_tokens", "new_tokens", "requests_per_s", "first_token_s", "token_s")
        ),
    )
    values = service_values(job)
    return [
        *_spoken(service, values),
        *_asked_next(service, values),
        "By `minipar plan --serve`:",
        "",
        "```",
        serving_text(plan_serving(job), with_fewer_bits(job)),
        "```",
        "",
    ]


def service_values(job: ServingJob) -> dict[str, float]:
    """Return the numbers that the text of a service quotes, from the planner."""
    plan = plan_serving(job)
    assert plan.apart is not None
    by_tp = {service.replica.tp: service for service in plan.services}
    best, two, eight = plan.services[0], by_tp[2], by_tp[8]
    load, token_bytes = best.load, cache_token_bytes(job.shape)
    fewer = {bits: shorter.services[0].gpus for bits, shorter in with_fewer_bits(job)}
    weight_bytes, prompt_s = rank_weight_bytes(job.shape), best.replica.prompt_s
    return dict(
        prompt_tokens=job.prompt_tokens, new_tokens=job.new_tokens, rate=job.requests_per_s,
        first_target_s=job.first_token_s, token_target_ms=1e3 * job.token_s,
        weights_gb=weight_bytes / 1e9, weights_ms=1e3 * best.step.weights_s,
        rows=rows_where_arithmetic_begins(job.reached, weight_bytes / job.shape.num_params),
        token_mb=token_bytes / 1e6, request_gb=token_bytes * job.request_tokens / 1e9,
        in_flight=job.requests_per_s * job.new_tokens * load.token_s,
        prompt_ms=1e3 * prompt_s, busy=load.requests_per_s * prompt_s,
        replicas=best.replicas, tp=best.replica.tp, fits=best.replica.fits, batch=load.batch,
        first_s=load.first_token_s, token_ms=1e3 * load.token_s, longest_ms=1e3 * load.longest_s,
        fits_2=two.replica.fits, gpus_2=two.gpus, token_2_ms=1e3 * two.load.token_s,
        gpus_8=eight.gpus, token_8_ms=1e3 * eight.load.token_s,
        apart_longest_ms=1e3 * plan.apart.tokens.load.longest_s, saved_8=best.gpus - fewer[Bits(8, 16)],
    )  # fmt: skip
