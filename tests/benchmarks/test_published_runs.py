"""The cost model against published runs: what was fitted, what was held out, and the doubt that `minipar plan` prints."""

import math
import re
from contextlib import ExitStack
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.planner import fit, planner_page, roofline
from benchmarks.planner.ablation import TERMS, score
from benchmarks.planner.fit import (
    NUMBERS,
    covered,
    dense,
    fitted_default,
    fitted_hidden,
    fitted_program,
    fitted_rows,
    mean_error,
    mixtures,
    pair_errors,
    program_of,
    ranking,
    runs_of,
    spearman,
    strangers_errors,
    unknown_error,
    weighted_quantile,
)
from benchmarks.planner.planner_page import page
from benchmarks.planner.published_choices import jobs, row
from benchmarks.planner.published_runs import TABLES, published_runs
from minipar.cost import planner, timing, work
from minipar.cost.doubt import DENSE, MIXED, NEAR, PER_DOUBLING, UNLIKE, doubt, unusual
from minipar.cost.layout import Implementation, Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.model_table import MODELS
from minipar.cost.planner import Candidate, Plan, plan, simplicity
from minipar.cost.programs import PROGRAMS
from tests.cost.published import SC21_TABLE1

ROOT = Path(__file__).parents[2]
RUNS = published_runs()
HELD = [run for run in RUNS if run.held_out]


def test_about_half_of_the_runs_are_held_out_and_every_table_is_used():
    held = sum(run.held_out for run in RUNS)
    assert 0.4 < held / len(RUNS) < 0.6
    assert {run.table for run in RUNS} == set(TABLES)
    assert {table.program for table in TABLES.values()} == set(PROGRAMS) - {"minipar"}


def test_megatrons_table_is_the_one_of_the_other_tests():
    rows = [run for run in RUNS if run.table == "megatron-table-1"]
    assert [(run.gpus, run.batch, run.rate) for run in rows] == [
        (row.gpus, row.batch, row.tflops) for row in SC21_TABLE1
    ]
    assert [run.layout.world_size for run in rows] == [row.gpus for row in SC21_TABLE1]


@pytest.mark.parametrize("program", NUMBERS)
def test_the_numbers_in_use_are_the_fitted_ones(program):
    fitted, used = fitted_program(program), PROGRAMS[program].implementation
    assert used.arithmetic == pytest.approx(fitted.arithmetic, abs=0.006)
    assert used.attention_speed == fitted.attention_speed


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_its_own_numbers_only_where_they_help(program):
    """They must bring the held-out dense runs nearer; a program without any has the default."""
    used, default = PROGRAMS[program].implementation, Implementation()
    own = (used.arithmetic, used.attention_speed) != (default.arithmetic, default.attention_speed)
    assert own == (program in NUMBERS)
    if own:
        held = dense(runs_of(program, held_out=True))
        assert mean_error(held, lambda run: run.error()) < mean_error(held, unknown_error)


def test_an_unknown_program_has_the_numbers_fitted_to_all():
    assert Implementation().arithmetic == pytest.approx(fitted_default(), abs=0.006)
    assert fitted_hidden() == timing.HIDDEN_ZERO3
    assert fitted_rows() == work.SLOW_ROWS


def test_held_out_runs_are_nearer_than_by_a_roofline():
    """Dense 4.7 % if the program is known, 7.8 % else; mixtures 20 %; ranking 0.92. Roofline: 12.5, 13.4, 21.7, 0.57."""

    def errors(known, unknown) -> tuple[float, ...]:
        return (
            mean_error(dense(HELD), known),
            mean_error(dense(HELD), unknown),
            mean_error(mixtures(HELD), known),
        )

    ours = errors(lambda run: run.error(), unknown_error)
    assert [ours[0] < 0.05, ours[1] < 0.08, ours[2] < 0.205] == [True] * 3
    plain = errors(roofline.known_error, roofline.unknown_error)
    assert all(mine < theirs for mine, theirs in zip(ours, plain))
    assert fmean(ranking().values()) > 0.9 > fmean(ranking(roofline.known_error).values()) + 0.2


# Terms that buy nothing on these runs, and why the model has them all the same (the page says it).
UNDECIDED = (
    "the model as it is",
    "gradients hide 0.3, not 0.9",
    "tp hides nothing where it is overlapped",
    "every program overlaps and buckets as ours",
    "no time for the update",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", [words for words in TERMS if words not in UNDECIDED])
def test_every_term_brings_held_out_runs_nearer(words):
    """One of the four figures gets worse without it."""
    with ExitStack() as stack:
        TERMS[words](stack)
        without = score()
    fit.forget()
    own = score()
    worse = [a > b for a, b in zip(without[:3], own[:3])] + [without.ranking < own.ranking - 0.01]
    assert any(worse)


def test_fsdp_with_flash_attention_by_an_unknown_program():
    """17 rows on A100, held out or not: mean absolute error 7.6 %, largest 15 %, to both sides."""
    runs = [run for run in RUNS if run.table == "mpt-a100-80gb" and run.seq_len <= 4096]
    found = [math.expm1(-run.error(Implementation())) for run in runs]
    (thirteen,) = [run for run in runs if (run.model, run.seq_len) == ("mpt 40 5120 40", 2048)]
    assert thirteen.job().shape.num_params == 12853954560  # as printed
    assert len(runs) == 17
    assert fmean(map(abs, found)) < 0.08
    assert -0.17 < min(found) < 0 < max(found) < 0.07


@pytest.mark.parametrize(
    "run", [run for run in RUNS if run.table == "llama-3"], ids=lambda run: run.layout.name
)
def test_llama_3_405b(run):
    """Within 5 %. How many chunks a rank has is not printed; 7 is as many as 126 layers allow."""
    assert abs(run.error()) < 0.05
    # Attention at the rate of a matrix product, as before 2023's kernels were measured: 131,072 tokens tell.
    speed = run.job().machine.matmul_fraction / run.job().machine.attention_fraction
    quick = run.error(Implementation(attention_speed=speed))
    assert quick < run.error()
    assert quick < -0.25 or run.seq_len < 131072


@pytest.mark.parametrize("run", [run for run in RUNS if run.table == "fsdp"], ids=lambda run: run.layout.name)
def test_fsdp_of_gpt3_on_128_gpus(run):
    """7 and 13 % too slow: three tenths of its messages hide, by the numbers of an unknown program."""
    assert -0.15 < math.expm1(-run.error()) < 0


def test_texts_count_the_runs_and_quote_the_doubt():
    lesson = (ROOT / "lessons" / "12_before_you_pay.ipynb").read_text(encoding="utf-8")
    for name in ("docs/use.md", "CHANGELOG.md", "lessons/12_before_you_pay.ipynb"):
        counts = re.findall(r"(\d+) published runs", (ROOT / name).read_text(encoding="utf-8"))
        assert set(counts) == {str(len(RUNS))}, name
    text = " ".join(lesson.replace('\\n",', " ").replace('"', " ").split())
    assert f"{100 * DENSE:.0f} % for a dense model" in text
    assert f"{100 * MIXED:.0f} % for a mixture" in text
    assert f"layouts within {NEAR:.0%}".replace("%", " %") in text
    assert f"arithmetic takes {Implementation().arithmetic} of what" in text
    assert "three tenths of the messages" in text
    assert timing.HIDDEN_ZERO3 == 3 / 10


def test_the_doubt_holds_four_of_five_runs_of_strangers():
    """Of all runs and of those held out, each predicted by numbers that were fitted to other programs alone."""
    errors = strangers_errors()
    for select in (dense, mixtures):
        for chosen in (RUNS, HELD):
            found = [(run, error) for run, error in errors if run in select(chosen)]
            assert 0.8 <= covered(found) < 0.92
    weight = {name: 1 / len(runs_of(name)) for name in PROGRAMS if runs_of(name)}
    inside = {True: 0.0, False: 0.0}
    for run, error in errors:
        inside[error <= doubt(run.job(), run.layout)] += weight[program_of(run)]
    assert (
        inside[True] > 2 * inside[False]
    )  # each program with the same weight: those of few runs are the stranger ones


def test_the_doubt_grows_with_nodes_and_unlikeness():
    job = Job(MODELS["llama-7b"], MACHINES["h100"], 8, 4096, 64)
    alone = doubt(job, parse_layout("dp8-zero1"))
    assert alone == DENSE
    assert doubt(replace(job, gpus=64), parse_layout("dp64")) == pytest.approx(DENSE + 3 * PER_DOUBLING)
    for unlike in ("dp4-cp2", "dp4-pp2-zb-v"):
        assert doubt(job, parse_layout(unlike)) == pytest.approx(DENSE + UNLIKE)
    other = replace(job, machine=MACHINES["b200"])
    assert doubt(other, parse_layout("dp8-zero1")) == pytest.approx(DENSE + UNLIKE)
    mixture = replace(job, shape=MODELS["mixtral-8x7b"])
    assert doubt(mixture, parse_layout("dp8-zero1")) == MIXED


def test_pairs_of_one_model_are_told_apart_by_near():
    assert math.ceil(100 * weighted_quantile([(error, 1) for error in pair_errors()], 0.8)) / 100 == NEAR


def test_a_fault_in_the_model_widens_the_errors():
    """Messages that all hide; the fastest attention kernel in place of Triton's."""
    held = runs_of("composer", held_out=True)

    def spread() -> float:
        errors = [run.error() for run in held]
        return fmean(abs(error - fmean(errors)) for error in errors)

    right = spread()
    with fit.changed(timing, "HIDDEN_ZERO3", 1.0):
        assert spread() > 1.15 * right
    how = replace(PROGRAMS["composer"].implementation, attention_speed=1.0)
    faulty = [run.error(how) for run in held]
    assert fmean(abs(error - fmean(faulty)) for error in faulty) > 1.3 * right


@pytest.mark.parametrize(
    ("values", "others", "correlation"),
    [((1, 2, 3, 4), (10, 20, 30, 40), 1), ((1, 2, 3), (3, 2, 1), -1), ((1, 1, 2, 2), (5, 5, 7, 7), 1)],
)
def test_spearman(values, others, correlation):
    assert spearman(values, others) == pytest.approx(correlation)


def test_dense_runs_within_one_table_are_ranked_as_measured():
    found = ranking()
    assert len(found) == 8
    assert min(value for table, value in found.items() if table != "xtuner") > 0.88
    assert found["xtuner"] > 0.7  # mixtures


def test_a_weighted_quantile_is_where_its_share_of_the_weight_lies():
    assert weighted_quantile([(3.0, 1), (1.0, 1), (2.0, 1)], 0.5) == 2
    assert weighted_quantile([(3.0, 5), (1.0, 1), (2.0, 1)], 0.5) == 3
    assert weighted_quantile([(-1.0, 1)], 0.5) == -1
    assert weighted_quantile([(x, 1) for x in range(10)], 0.8) == 7


def test_the_pages_tables_are_written_anew():
    text = (ROOT / "docs" / "generated" / "planner.md").read_text(encoding="utf-8")
    sections = (
        planner_page._introduction(RUNS, HELD),
        planner_page._by_program(RUNS),
        planner_page._doubt(RUNS),
        planner_page._one_h200(),
    )
    for lines in (*sections, planner_page._every_run(RUNS)):
        assert "\n".join(lines) in text


@pytest.mark.thorough
def test_the_page_is_written_anew_from_the_table():
    assert (ROOT / "docs" / "generated" / "planner.md").read_text(encoding="utf-8") == page()


@pytest.mark.thorough
def test_the_page_of_choices_is_what_the_planner_chooses():
    """The two smallest jobs, planned anew; all of them take minutes."""
    text = (ROOT / "docs" / "generated" / "planner_choices.md").read_text(encoding="utf-8")
    assert len(jobs()) >= 12
    assert text.count("\n| ") == len(jobs()) + 1
    assert all(f"| `{theirs.layout.name}` |" in text for theirs in jobs())
    for run in jobs()[:2]:
        assert row(run) in text


# The choice ------------------------------------------------------------------------------------------------------------


def test_of_layouts_that_cannot_be_told_apart_the_simplest_is_chosen():
    found = plan(Job(MODELS["llama-7b"], MACHINES["a100-80gb"], 8, 4096, 64))
    usual = [c for c in found.fits if not unusual(found.job, c.layout)]  # what is unusual would save little
    least = min(c.seconds for c in usual)
    near = [c for c in usual if c.seconds <= (1 + NEAR) * least]
    assert sorted(found.near) == sorted(near)
    key = {c.name: simplicity(found.job, c.layout) for c in near}
    assert key[found.choice.name] == min(key.values())
    shown = found.shown()
    assert shown[0] == found.choice
    meshes = [(c.layout.dp, c.layout.pp, c.layout.cp, c.layout.ep, c.layout.tp) for c in shown]
    assert len(set(meshes)) == len(meshes)


SIMPLEST, LEAN, LATE = "dp8-zero3-mb1", "dp4-tp2-zero1-mb1", "dp8-zero1-mb1"


def chosen(gigabytes: tuple[float, float, float] = (70, 30, 50)) -> str:
    """The choice of three layouts: one is a little slower than a less simple one, and the simplest of all is too slow."""
    job = Job(MODELS["llama-7b"], MACHINES["a100-80gb"], 8, 4096, 64)
    found = Plan(job, 10)
    for name, seconds, number in zip((SIMPLEST, LEAN, LATE), (1 + NEAR / 2, 1.0, 1 + 2 * NEAR), gigabytes):
        found.fits.append(Candidate(seconds, 1e9 * number, parse_layout(name), seconds))
    found.fits.sort()
    return found.choice.name


def test_bytes_break_no_tie():
    assert {chosen(gigabytes) for gigabytes in permutations((30, 50, 70))} == {SIMPLEST}


def fewest_bytes(found: Plan) -> list[Candidate]:
    most = (1 + NEAR) * found.leader.seconds
    return sorted((c for c in found.fits if c.seconds <= most), key=lambda c: c.num_bytes)


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (Plan, "near", property(fewest_bytes)),
        (Plan, "choice", property(lambda found: found.best[0])),
        (planner, "simplicity", lambda job, a: 0),
        (planner, "simplicity", lambda job, a: tuple(-x for x in simplicity(job, a))),
        (planner, "NEAR", 0.0),
        (planner, "NEAR", 1.0),
    ],
    ids=["fewest bytes", "fastest", "no order", "least simple", "no tie", "all tied"],
)
def test_a_planted_fault_in_breaking_ties_is_seen(where, name, fault, monkeypatch):
    assert chosen() == SIMPLEST
    monkeypatch.setattr(where, name, fault)
    assert {chosen(gigabytes) for gigabytes in permutations((30, 50, 70))} != {SIMPLEST}


@pytest.mark.parametrize(
    ("simpler", "other"),
    [
        ("dp8-zero1", "dp4-cp2-zero3"),
        ("dp2-cp2-tp2-zero1", "cp4-tp2-zero1"),
        ("dp8-zero1", "dp8-zero3"),
        ("dp2-pp2-tp2-zero1-1f1b", "pp4-tp2-interleaved:2"),
        ("dp8-zero1", "dp8-zero1-full"),
        ("dp2-pp2-tp2-zero1", "dp2-pp2-cp2-zero1"),
        ("dp4-tp2-zero1", "dp4-pp2-zero1"),
        ("dp4-pp2-zero1-1f1b", "dp4-pp2-zero1-zb-v"),
        ("dp4-pp2-zero1-interleaved:2", "dp4-pp2-zero1-interleaved:4"),
    ],
)
def test_simpler(simpler, other):
    job = Job(MODELS["llama-7b"], MACHINES["a100-80gb"], 8, 4096, 64)
    assert simplicity(job, parse_layout(simpler)) < simplicity(job, parse_layout(other))


@pytest.mark.thorough
def test_cp_is_not_chosen_for_short_samples_on_one_node():
    """A ring costs small blocks, merges and messages that are not hidden: a plan of 4,096 tokens does without."""
    for gpus, model in ((8, "llama-7b"), (64, "llama-70b")):
        assert plan(Job(MODELS[model], MACHINES["a100-80gb"], gpus, 4096, 16 * gpus)).choice.layout.cp == 1
