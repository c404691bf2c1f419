"""The planner against brute force, its reasons recomputed, and jobs that fit nothing."""

from dataclasses import replace
from itertools import product

import pytest

from benchmarks.planner.published_runs import published_runs
from minipar.cost.doubt import NEAR, unusual
from minipar.cost.layout import Implementation, Job, Layout, parse_layout, why_illegal
from minipar.cost.machines import MACHINES
from minipar.cost.memory import worst_rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.models import ModelShape
from minipar.cost.planner import (
    FAMILIES,
    REACH,
    SEARCHED,
    SEARCHED_CP,
    Candidate,
    Infeasible,
    Plan,
    families_of,
    is_short,
    plan,
)
from minipar.cost.reasons import no_fit, reasons, why_nots
from minipar.cost.report import _near_words
from minipar.cost.stages import FORMS, forms_of, unplanned
from minipar.cost.timing import step_time
from minipar.schedules.registry import SCHEDULES

TINY = ModelShape("tiny", 8, 1024, 8, 2816, 32000, 4)
JOBS = [
    Job(TINY, replace(MACHINES["h100"], memory_bytes=5e9), 8, 512, 16),
    Job(TINY, replace(MACHINES["h100"], memory_bytes=4.2e9, gpus_per_node=2), 4, 256, 8),
    Job(
        replace(TINY, num_experts=4, top_k=2, moe_every=2), replace(MACHINES["a100-80gb"], memory_bytes=8e9), 4, 512, 8,
        implementation=Implementation("dense"),
    ),
    Job(TINY, replace(MACHINES["h100"], memory_bytes=1e9), 4, 512, 8),
    # Whole gradients are too much here, so that only one large microbatch fits.
    Job(replace(TINY, num_heads=1, num_kv_heads=1), replace(MACHINES["h100"], memory_bytes=2.68e9), 8, 32, 16),
    # One long sample, on a machine whose nodes are slow to reach.
    Job(TINY, replace(MACHINES["h100"], memory_bytes=9e9, gpus_per_node=1, card_bytes_per_s=1e9), 4, 16384, 1),
]  # fmt: skip


def accumulates(job: Job, layout: Layout) -> bool:
    """Whether unsharded gradients accumulate, so that ZeRO-2 is like ZeRO-1."""
    return layout.microbatches(job) > 1 and job.implementation.reduce_every == "step"


def brute_force(job: Job) -> tuple[list[Candidate], dict[Layout, float]]:
    """Every layout that nothing stands against: those that fit, best first, and by how much the others do not.

    Short samples are split only if nothing else fits.
    """
    found = [(a, *what) for a, *what in every_layout(job)]
    if is_short(job) and any(excess <= 0 and a.cp == 1 for a, excess, _ in found):
        found = [each for each in found if each[0].cp == 1]
    fits = [
        Candidate(float(f"{seconds:.4g}"), job.machine.memory_bytes + excess, a, seconds)
        for a, excess, seconds in found
        if excess <= 0
    ]
    return sorted(fits), {a: excess for a, excess, _ in found if excess > 0}


def every_layout(job: Job):
    """Yield (layout, bytes beyond the memory, seconds) of each legal layout."""
    sizes = [d for d in range(1, job.gpus + 1) if job.gpus % d == 0]
    orders = [
        (name, v)
        for name in SEARCHED
        for v in ((2, 4) if SCHEDULES[name].chunks is None else (SCHEDULES[name].chunks,))
    ]
    recomputes = ("none", "selective", "full", "every:2", "every:4", "every:8")
    for tp, pp, cp, dp, ep in product(sizes, repeat=5):
        if tp * pp * cp * dp != job.gpus:
            continue
        zeros = range(4) if dp * cp > 1 else (0,)
        for zero, (name, v), mb, how, attention in product(
            zeros, orders, range(1, job.batch + 1), recomputes, SEARCHED_CP
        ):
            layout = Layout(dp, pp, cp, ep, tp, zero, name, v, mb, how, attention)
            if why_illegal(job, layout) or (zero == 2 and accumulates(job, layout)):
                continue
            num_bytes = sum(worst_rank_memory(job, layout)[1].values())
            yield layout, num_bytes - job.machine.memory_bytes, step_time(job, layout).total


def test_no_family_is_too_large_whose_slow_layouts_fit():
    job = Job(MODELS["mixtral-8x7b"], MACHINES["h100"], 16, 4096, 64, margin_bytes=0)
    slow = parse_layout("tp16-zero0-mb64-full")
    assert sum(worst_rank_memory(job, slow)[1].values()) < job.room_bytes
    assert ("tp", 16) in families_of(job, slow)
    assert not isinstance(plan(job).families.get(("tp", 16)), Infeasible)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "job", JOBS, ids=lambda job: f"{job.gpus} GPUs of {job.machine.memory_bytes / 1e9} GB"
)
def test_the_plan_is_that_of_brute_force(job):
    fits, excess = brute_force(job)
    found = plan(job)
    reach = REACH * fits[0].seconds if fits else 0
    within = [fit.layout for fit in fits if fit.seconds <= reach]
    assert [c.layout for c in found.fits[: len(within)]] == within
    assert found.best == found.fits[:10]
    assert found.legal == len(fits) + len(excess) >= found.seen
    assert {c.layout for c in found.fits} <= {fit.layout for fit in fits}
    near = near_of(job, fits)
    assert (
        sorted(c.layout for c in found.near if fits) == sorted(c.layout for c in near)
        if fits
        else not found.fits
    )
    front, least = [], float("inf")
    for seconds, num_bytes in sorted((fit.seconds, fit.num_bytes) for fit in fits):
        if num_bytes < least:
            front.append((seconds, num_bytes))
            least = num_bytes
    mine = [at for at in found.frontier if at[0] <= reach]
    assert mine == [pytest.approx(at) for at in front if at[0] <= reach]
    for axis in FAMILIES:
        for value in {getattr(layout, axis) for layout in [*excess, *(fit.layout for fit in fits)]}:
            of_family = [fit for fit in fits if (axis, value) in families_of(job, fit.layout)]
            of_search = found.families.get((axis, value))
            if of_family and min(of_family).seconds <= reach:
                assert of_search.layout == min(of_family).layout
            elif not of_family:
                assert of_search is None or of_search.excess > 0


def near_of(job: Job, fits: list[Candidate]) -> list[Candidate]:
    """The usual layouts within NEAR of the fastest usual one; of all, if the fastest of all saves more than NEAR twice."""
    if not fits:
        return []
    usual = [fit for fit in fits if not unusual(job, fit.layout)]
    if not usual or usual[0].seconds > (1 + NEAR) ** 2 * fits[0].seconds:
        usual = [fit for fit in fits if bool(unusual(job, fit.layout)) == bool(unusual(job, fits[0].layout))]
    return [fit for fit in usual if fit.seconds <= (1 + NEAR) * usual[0].seconds]


@pytest.mark.parametrize(
    ("name", "saved", "taken"),
    [
        ("dp16-pp2-zb-v", 0.14, False), ("dp16-pp2-zb-v", 0.15, True), ("dp2-tp16", 0.14, False), ("dp2-tp16", 0.15, True),
    ],
)  # fmt: skip
def test_what_is_unusual_must_save_more_than_its_doubt(name, saved, taken):
    """1.07 * 1.07 = 1.145. Where the usual is taken, layouts near the fastest usual one are near."""
    job = Job(MODELS["llama-7b"], MACHINES["h100"], 32, 4096, 32)
    fast, whole, split, slow = (
        Candidate(seconds, 1.0, parse_layout(layout), seconds)
        for layout, seconds in (
            (name, 1.0), ("dp16-pp2-1f1b", 1 + saved), ("dp32", 1.04 * (1 + saved)), ("dp32-zero3", 1.1 * (1 + saved)),
        )
    )  # fmt: skip
    found = Plan(job, 10, sorted([slow, split, whole, fast]))
    assert (found.choice == fast) == taken
    words = f"{fast.name} is predicted to save {1 - 1 / (1 + saved):.1%}, less than the doubt"
    assert (words in _near_words(found)) != taken
    if not taken:
        assert found.near == [split, whole]


def test_short_samples_are_split_only_where_nothing_else_fits():
    """Whole, one sample of 8,192 tokens is too much for a GPU whose node is slow to reach: only cp is left."""
    job = Job(
        replace(TINY, num_heads=1, num_kv_heads=1, num_layers=1),
        replace(MACHINES["h100"], memory_bytes=4.2e9),
        4,
        8192,
        1,
    )
    assert plan(job).choice.layout.cp > 1
    roomy = replace(job, machine=MACHINES["h100"], batch=4)
    assert all(candidate.layout.cp == 1 for candidate in plan(roomy).fits)


def test_no_published_run_does_what_is_called_unusual():
    for run in published_runs():
        assert not unusual(run.job(), run.layout), run


def test_every_reason_is_recomputed():
    job = Job(MODELS["llama-70b"], MACHINES["a100-80gb"], 64, 4096, 64)
    found = plan(job)
    why = reasons(found)
    assert {r.axis for r in why} >= {"tp", "pp", "zero", "schedule", "recompute"}
    assert len({r.layout for r in why_nots(found)}) == len(why_nots(found)) >= 4
    assert {(r.axis, r.value) for r in why} == {
        key for key in found.families if getattr(found.choice.layout, key[0]) != key[1]
    }
    best = step_time(job, found.choice.layout)
    for reason in why:
        assert getattr(reason.layout, reason.axis) == reason.value
        assert why_illegal(job, reason.layout) is None
        items = worst_rank_memory(job, reason.layout)[1]
        excess = sum(items.values()) - job.machine.memory_bytes
        if reason.lost_s is None:
            assert reason.excess_bytes == excess > 0
            assert f"{excess / 1e9:.1f} GB too much" in reason.text
            assert items[reason.part] == max(items.values())
            continue
        step = step_time(job, reason.layout)
        assert excess <= 0
        assert reason.lost_s == pytest.approx(step.total - best.total)
        assert ("faster" in reason.text) == (reason.lost_s < 0)
        more = {name: step.parts[name] - best.parts[name] for name in step.parts}
        assert more[reason.part] == max(more.values())
        if reason.axis == "tp":
            assert ("leaves the node" in reason.text) == (reason.value > 8)


def test_nothing_that_is_better_in_both_is_left_off_the_front():
    found = plan(JOBS[0])
    front = found.frontier
    assert front[0][0] == min(fit.seconds for fit in found.fits)
    assert front[-1][1] == min(fit.num_bytes for fit in found.fits)
    assert front == sorted(front)
    for fit in found.fits:
        assert any(s <= fit.seconds and b <= fit.num_bytes for s, b in front)


@pytest.mark.thorough
def test_of_the_layouts_of_sixteen_thousand_gpus_few_are_weighed():
    """Some seconds' work; what is counted here is the work, not the clock."""
    found = plan(Job(MODELS["llama3-405b"], MACHINES["h100"], 16384, 8192, 2048))
    assert 100 < len(found.fits) <= found.seen < 5_000 < 8_000 < found.legal
    assert found.best[0].num_bytes <= 80e9


# The 70B question ------------------------------------------------------------------------------------------------------


def test_70b_on_64_gpus_does_not_fit_without_zero():
    job = Job(MODELS["llama-70b"], MACHINES["a100-80gb"], 64, 4096, 1024)
    total = {
        text: sum(worst_rank_memory(job, parse_layout(text))[1].values()) / 1e9
        for text in ("dp4-pp2-tp8", "dp4-pp2-tp8-zero1", "dp4-pp2-tp8-full")
    }
    assert total["dp4-pp2-tp8"] > 80 > total["dp4-pp2-tp8-zero1"]
    assert total["dp4-pp2-tp8-full"] < 80
    assert total["dp4-pp2-tp8"] - total["dp4-pp2-tp8-zero1"] == pytest.approx(12 * 69 / 16 * 3 / 4, rel=0.02)


# Nothing fits ----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_job_that_fits_nothing_says_by_how_much_and_what_would_help():
    job = Job(MODELS["llama-70b"], MACHINES["v100"], 8, 4096, 64)
    found = plan(job)
    assert found.best == []
    line = no_fit(found)
    assert "llama-70b does not fit 8 x v100" in line
    assert f"{found.nearest.excess / 1e9:.1f} GB too much" in line
    gpus = int(line.partition("gpus=")[2].split()[0])
    assert plan(replace(job, gpus=gpus)).best
    assert not plan(replace(job, gpus=gpus // 2)).best
    machine = line.partition("machine=")[2].split()[0]
    assert plan(replace(job, machine=MACHINES[machine])).best


def test_a_number_of_gpus_that_cannot_share_the_batch_is_told_apart():
    job = Job(TINY, MACHINES["h100"], 11, 512, 16)
    assert "no layout of tiny over gpus=11 with batch=16 is legal" in no_fit(plan(job))


def test_a_schedule_is_planned_or_it_is_said_what_to_plan():
    assert set(SCHEDULES.own) == set(FORMS) <= set(SCHEDULES) <= {*FORMS, *unplanned()}
    assert not set(FORMS) & set(unplanned())
    for name in set(SCHEDULES) - set(FORMS):
        with pytest.raises(ValueError, match=f"schedule={name} {unplanned()[name]}"):
            forms_of(name)


# Layouts as text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp=4, pp=2, tp=8, zero=1),
        Layout(2, 4, 2, 4, 8, 3, "interleaved", 4, 2, "full"),
        Layout(pp=8, cp=8, zero=1, schedule="zb-v", chunks=2),
        Layout(pp=2, schedule="breadth-first", chunks=2, recompute="selective"),
        Layout(pp=2, schedule="zb-h1"),
        Layout(pp=2, cp=4, schedule="zb-auto", recompute="every:4", cp_attention="ulysses"),
        Layout(dp=2, cp=4, recompute="full", cp_attention="all_gather"),
        Layout(pp=2, schedule="dualpipe-v", chunks=2),
    ],
    ids=lambda layout: layout.name,
)
def test_a_layouts_name_is_read_again(layout):
    assert parse_layout(layout.name) == layout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dp4-qq2", "'qq2' cannot be read"),
        ("dp0", "sizes begin at 1"),
        ("zero4", "zero is 0 to 3"),
        ("1f2b", "'1f2b'"),
        *((f"pp4-{name}", f"{name} {instead}") for name, instead in unplanned().items()),
        ("pp4-1f1b:2", "chunks=2 stages a rank with schedule=.1f1b., which has 1"),
    ],
)
def test_a_layout_that_cannot_be_read_says_which_part(text, says):
    with pytest.raises(ValueError, match=says):
        parse_layout(text)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("dp4-tp4", "16 ranks, and there are gpus=8"),
        ("tp8-mb1", None),
        ("dp8-ep3", "ep=3 spreads experts, and num_experts=0: the model has none"),
        ("dp8-mb3", "mb=3 does not divide a rank's samples (batch_size/dp)=2"),
        ("pp8-interleaved:2", "has 16 stages, and num_layers=8"),
        ("dp8-selective", "stores no scores"),
        ("pp4-dp2-zb-h1-mb4", "2 microbatches do not fill schedule=zb-h1 over pp=4"),
        ("dp8-zb-h1", "schedule=zb-h1 needs pp of 2 or more"),
        ("dp8-ulysses", "cp_attention=ulysses needs cp of 2 or more"),
        ("cp8-ulysses", None),
        ("tp4-cp2-every:3", None),
        ("tp8-every:9", "recompute=every:9 is more than the 8 layers of a stage"),
        ("tp2-cp4-ulysses", None),
        ("tp8-dp1-pp1-cp1", None),
    ],
)
def test_what_stands_against_a_layout(layout, says):
    why = why_illegal(JOBS[0], parse_layout(layout))
    assert why is None if says is None else says in why
