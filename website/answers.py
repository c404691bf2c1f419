"""Answers for the interactive pages: functions from plain values to plain values, run by Python in the page. No torch.

An answer is a dict. For an impossible request, it is {"error": the library's error message}, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from minipar.cost import stages
from minipar.cost.collectives import collective_s
from minipar.cost.layout import Job, Layout, require_legal
from minipar.cost.machines import MACHINES, find_machine
from minipar.cost.memory import worst_rank_memory
from minipar.cost.model_table import MODELS, find_model
from minipar.cost.plan_command import MARGIN
from minipar.cost.planner import plan
from minipar.cost.reasons import no_fit, reasons
from minipar.cost.report import headline, plan_json, run_lines
from minipar.cost.timing import step_time
from minipar.mesh.mesh import Mesh
from minipar.mesh.nodes import axes_across_nodes
from minipar.schedules import (
    Action,
    Costs,
    Deadlock,
    Schedule,
    make_schedule,
    simulate,
    to_torch,
    validate,
)
from minipar.schedules.registry import chunks_per_rank, find_schedule
from minipar.schedules.schedule import output_key
from minipar.schedules.timeline import Timeline
from minipar.support.errors import one_of
from website.puzzles import puzzle, read

MOST = {"p": 64, "m": 1024, "v": 8, "slices": 64, "ranks": 4096, "gpus": 100_000}
MOST_ACTIONS = 60_000


def answer(name: str, request: str) -> str:
    """Answer a page's request; both are JSON."""
    try:
        if name not in ANSWERS:
            raise ValueError(f"{name!r} is unknown; use {one_of(ANSWERS, near=name)}")
        return json.dumps(ANSWERS[name](json.loads(request)))
    except Deadlock as error:
        return json.dumps({"error": str(error), "cycle": list(error.cycle), "blocked": sorted(error.blocked)})
    except ValueError as error:
        return json.dumps({"error": str(error)})


def whole(request: dict, name: str, default: int, least: int = 1) -> int:
    """Return a whole number from the request. Raises ValueError where it is not a whole number, or out of range."""
    value, most = request.get(name, default), MOST.get(name)
    try:
        number = int(str(value))
    except ValueError:
        raise ValueError(f"{name}={value!r} is not a whole number") from None
    if number < least or (most is not None and number > most):
        limits = f"{least} to {most}" if most is not None else f"{least} or more"
        raise ValueError(f"{name}={number}; use {limits}")
    return number


def seconds(request: dict, name: str, default: float = 1.0):
    """Return a cost from the request: one number or, from "1, 1, 2", a list with one per stage."""
    text = str(request.get(name, default))
    try:
        values = [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        values = []
    if not values:
        raise ValueError(f"{name}={text!r} is no number, and no list of one per stage")
    return values[0] if len(values) == 1 else values


# Pipelines ---------------------------------------------------------------------------------------------------------


def timeline_of(request: dict) -> Timeline:
    """Simulate the schedule that the page's settings describe, or the order into which the reader has changed it."""
    name, p, m = request.get("schedule", "1f1b"), whole(request, "p", 4), whole(request, "m", 8)
    choice = find_schedule(name)
    v = chunks_per_rank(name, whole(request, "v", 2) if choice.chunks is None else None)
    slices = whole(request, "slices", 2) if choice.sliced else 1
    if (actions := p * m * v * slices * 3) > MOST_ACTIONS:
        pieces = f"{v} chunks" if slices == 1 else f"{slices} slices"
        raise ValueError(f"p={p}, m={m} and {pieces} make {actions:,} actions; use {MOST_ACTIONS:,} or fewer")
    costs = Costs(*(shared(seconds(request, op), v, slices) for op in "FIW"), seconds(request, "comm", 0.0))
    limit = request.get("memory_limit") or None
    most = None if limit is None else float(seconds(request, "memory_limit"))
    arguments = {"costs": costs, "memory_limit": most, "slices": slices}
    made = make_schedule(
        name, p, m, v, **{taken: arguments[taken] for taken in choice.takes if taken in arguments}
    )
    if orders := request.get("orders"):
        actions = tuple(tuple(Action(*a) for a in own) for own in orders)
        made = replace(made, actions=actions, name="yours")
        validate(made)
    return simulate(made, costs)


def shared(cost, v: int, slices: int):
    """Return the cost per action: divide a rank's cost among chunks and slices, a list of stages' costs among slices."""
    return [one / slices for one in cost] if isinstance(cost, list) else cost / (v * slices)


def pipeline(request: dict) -> dict:
    """Return the timeline, each rank's actions as [op, stage, microbatch, start, end], and figures computed from it."""
    timeline = timeline_of(request)
    schedule = timeline.schedule
    return {
        "name": schedule.name,
        "ranks": [[[*action, *timeline.spans[action]] for action in own] for own in schedule.actions],
        "stage_rank": schedule.stage_rank,
        "makespan": timeline.makespan,
        "own_span": timeline.longest_own_span,
        "ideal": timeline.ideal,
        "bubble_over_total": timeline.bubble_over_total,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "peak_live": timeline.peak_live,
        "live": [timeline.live(rank) for rank in range(schedule.num_ranks)],
        "critical": timeline.critical_path,
        "slices": getattr(schedule, "slices", 1),
        **in_torch(schedule),
    }


def in_torch(schedule: Schedule) -> dict:
    """Return the schedule in the form that torch's runtime reads, or the reason why it cannot."""
    try:
        return {"csv": to_torch(schedule)}
    except ValueError as error:
        return {"csv": None, "no_csv": str(error)}


def action(request: dict) -> dict:
    """Return the actions that one action needs, and the actions that wait for its result."""
    timeline = timeline_of(request)
    schedule, asked = timeline.schedule, Action(*request["action"])
    by_result = {output_key(a): a for a in timeline.spans}
    own = [by_result[output_key(need)] for need in schedule.needs(asked)]
    waiting = [a for a in timeline.spans if output_key(asked) in map(output_key, schedule.needs(a))]
    start, end = timeline.spans[asked]
    return {
        "text": f"{asked}, on rank {schedule.stage_rank[asked.stage]}, from {start:g} to {end:g}",
        "needs": own,
        "waiting": waiting,
    }


# The planner -------------------------------------------------------------------------------------------------------


# The fields of a layout that the page's form shows.
FORM = ("dp", "pp", "tp", "cp", "ep", "zero", "microbatch", "schedule", "recompute")


def job_of(request: dict) -> Job:
    machine = find_machine(request.get("machine", "a100-80gb"))
    return Job(
        find_model(request.get("model", "llama-70b")), machine,
        whole(request, "gpus", 64), whole(request, "seq", 4096), whole(request, "batch", 1024),
        request.get("precision", "mixed"), margin_bytes=MARGIN * machine.memory_bytes,
    )  # fmt: skip


def planned(request: dict) -> dict:
    """Return the best layouts and why the others lost, as in `minipar plan --json`, and the card's bytes."""
    job = job_of(request)
    found = plan(job, 10)
    if not found.best:
        raise ValueError(no_fit(found))
    result = plan_json(found, reasons(found)) | {"card": job.machine.memory_bytes}
    for shown, choice in zip(result["best"], found.shown(), strict=True):
        shown["form"] = {field: getattr(choice.layout, field) for field in FORM}
    try:
        result["commands"] = run_lines(job, found.choice.layout)
    except ValueError as error:
        result["commands"] = [str(error)]
    return result


def layout(request: dict) -> dict:
    """Return one layout itemised, with the numbers of `minipar plan --explain`."""
    job = job_of(request)
    name = request.get("schedule", "1f1b")
    asked = Layout(
        **{axis: whole(request, axis, 1) for axis in ("dp", "pp", "cp", "ep", "tp")}, zero=whole(request, "zero", 0, 0),
        schedule=name, chunks=chunks_per_rank(name), microbatch=whole(request, "microbatch", 1),
        recompute=request.get("recompute", "none"),
    )  # fmt: skip
    if asked.zero > 3:
        raise ValueError(f"zero={asked.zero}; use 0 to 3")
    require_legal(job, asked)
    (rank, items), step = worst_rank_memory(job, asked), step_time(job, asked)
    return {
        "layout": asked.name,
        "job": headline(job),
        "memory": items,
        "card": job.machine.memory_bytes,
        "fullest_pp_rank": rank,
        "seconds": step.total,
        "parts": step.parts,
        "mfu": step.mfu,
        "hfu": step.hfu,
    }


def choices(_request: dict) -> dict:
    """Return the names that the planner knows."""
    return {"models": list(MODELS), "machines": list(MACHINES), "schedules": list(stages.FORMS)}


# Collectives and meshes --------------------------------------------------------------------------------------------

# label -> (kind, algorithm): the all-reduces in the alpha-beta model
CURVES = {"ring": ("all_reduce", "ring"), "halving-doubling": ("all_reduce", "halving_doubling")}


def curves(request: dict) -> dict:
    """Return the seconds of an all-reduce by size, and the sizes from which the next algorithm is faster."""
    p = whole(request, "p", 8)
    alpha, gigabytes = float(seconds(request, "alpha_us", 10)) * 1e-6, float(seconds(request, "gb_per_s", 25))
    if alpha < 0 or gigabytes <= 0:
        raise ValueError(f"alpha_us={alpha * 1e6:g}, gb_per_s={gigabytes:g}; use 0 or more, and above 0")
    sizes = [2 ** (n / 2) for n in range(16, 65)]
    tree_rounds = 2 * max(p - 1, 0).bit_length()
    beta = 1 / (gigabytes * 1e9)
    lines = {
        label: [collective_s(kind, p, size, alpha, beta, algorithm) for size in sizes]
        for label, (kind, algorithm) in CURVES.items()
        if algorithm == "ring" or p & (p - 1) == 0
    }
    lines["tree: reduce, then broadcast"] = [tree_rounds * (alpha + size * beta) for size in sizes]
    best = [min(lines, key=lambda label, i=i: lines[label][i]) for i in range(len(sizes))]
    turns = [[sizes[i], best[i - 1], best[i]] for i in range(1, len(sizes)) if best[i] != best[i - 1]]
    return {"sizes": sizes, "lines": lines, "crossovers": turns}


def mesh(request: dict) -> dict:
    """Return the ranks by node, and one rank's groups: which ranks hold the same or sum gradients, what leaves the node."""
    sizes = {axis: whole(request, axis, 1) for axis in ("pp", "dp", "cp", "tp", "ep")}
    world = sizes["pp"] * sizes["dp"] * sizes["cp"] * sizes["tp"]
    if world > MOST["ranks"]:
        raise ValueError(f"pp x dp x cp x tp makes {world:,} ranks; use {MOST['ranks']:,} or fewer")
    grid, node = Mesh(world, **sizes), whole(request, "ranks_per_node", 8)
    rank = whole(request, "rank", 0, 0)
    if rank >= world:
        raise ValueError(f"rank={rank} is not in a world of {world}; use 0 to {world - 1}")
    at = grid.coordinates_of(rank)
    dense = grid.group(rank, "dp", "cp")
    return {
        "world": world,
        "ranks_per_node": node,
        "rank": rank,
        "coordinates": at._asdict(),
        "all_coordinates": [grid.coordinates_of(r)._asdict() for r in range(world)],
        "groups": {axis: grid.group(rank, axis) for axis in ("pp", "dp", "cp", "tp", "ep", "edp")},
        "gradients": dense,
        "expert_gradients": grid.group(rank, "edp"),
        "leaves_the_node": axes_across_nodes(sizes, node),
        "holds": _held(at, grid.sizes),
    }


def _held(at, sizes: dict[str, int]) -> list[str]:
    """Describe what this rank holds of the model and of the batch."""
    share = (
        f"rows or columns {at.tp + 1} of {sizes['tp']} of every matrix"
        if sizes["tp"] > 1
        else "whole matrices"
    )
    return [
        f"layers: part {at.pp + 1} of {sizes['pp']}, stage {at.pp}" if sizes["pp"] > 1 else "layers: all",
        f"of them: {share}",
        f"experts: part {at.ep + 1} of {sizes['ep']}" if sizes["ep"] > 1 else "experts, if any: all",
        f"samples: part {at.dp + 1} of {sizes['dp']} of the batch"
        if sizes["dp"] > 1
        else "samples: the whole batch",
        f"tokens: part {at.cp + 1} of {sizes['cp']} of each sample"
        if sizes["cp"] > 1
        else "tokens: whole samples",
    ]


ANSWERS: dict[str, Callable[[dict], dict]] = {
    "pipeline": pipeline,
    "action": action,
    "plan": planned,
    "layout": layout,
    "choices": choices,
    "curves": curves,
    "mesh": mesh,
    "puzzle": puzzle,
    "read": read,
}
