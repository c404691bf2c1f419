"""The guide's pages are what is computed now, their formulas give the planner's bytes, and their sentences hold."""

import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.guide import foreign, routing, tuning
from benchmarks.guide import strategies as map_of
from benchmarks.guide import workloads as jobs
from benchmarks.guide.strategies import part_text, strategies
from benchmarks.guide.tuning import LAYERS, RANKS, SETTINGS, STEPS, Setting, figures
from benchmarks.guide.workloads import Priced, gain, naive, paragraph, row, workloads
from minipar.cli import _parse
from minipar.cli.flags import config_of
from minipar.config.train_config import TrainConfig
from minipar.cost.layout import Layout
from minipar.cost.planner import plan

DOCS = Path(__file__).parents[2] / "docs" / "generated"
RENEW = "run: python -m benchmarks.guide docs/generated"

# Strategies ------------------------------------------------------------------------------------------------------------

STRATEGIES = {strategy.name: strategy for strategy in strategies()}


def test_the_map_is_that_of_the_planner():
    assert (DOCS / "strategies.md").read_text(encoding="utf-8") == map_of.page(), RENEW


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_formula_gives_the_bytes_that_the_planner_counts(name):
    strategy = STRATEGIES[name]
    assert strategy.formula_bytes() == pytest.approx(strategy.sent_bytes(), rel=1e-3)
    assert strategy._replace(sends=f"0.99 * ({strategy.sends})").formula_bytes() != pytest.approx(
        strategy.sent_bytes(), rel=1e-3
    )


def test_a_strategy_splits_what_its_axis_splits():
    """What is whole for one is cut for another; nothing is cut by nobody."""
    cut = {name: {part for part, share in s.parts().items() if share < 0.5} for name, s in STRATEGIES.items()}
    states = {"parameters", "gradients", "states"}
    assert cut["Data parallelism"] == {"batch"}
    assert cut["ZeRO-1"] == {"batch", "states"}
    assert cut["ZeRO-2"] == {"batch", "gradients", "states"}
    assert cut["ZeRO-3, or FSDP"] == cut["Hybrid sharding"] == {"batch"} | states
    assert cut["Tensor parallelism"] == states | {"activations"}
    assert cut["Pipeline parallelism, 1F1B"] == states | {"layers"}  # and not activations
    assert cut["Context parallelism, ring"] == {"sequence", "activations"}
    assert set().union(*cut.values()) == set(map_of.COLUMNS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategys_flags_file_and_lesson_exist(name):
    strategy = STRATEGIES[name]
    flags, *_ = re.findall(r"`(--[^`]+)`", strategy.where)
    small = "--batch-size 16 --model.num-layers 8 --model.num-heads 8 --model.num-kv-heads 8 --model.dim 128"
    config = config_of(_parse(shlex.split(f"train {flags} {small}")).args[0], TrainConfig)
    a = strategy.split
    if "recompute" not in flags:
        assert (config.dp, config.pp, config.cp, config.ep, config.tp) == (a.dp, a.pp, a.cp, a.ep, a.tp)
    assert (config.zero, config.replicate) == (a.zero, strategy.replicate)
    files = [*re.findall(r"\]\((\S+)\)", strategy.where), f"../../lessons/{strategy.lesson}.ipynb"]
    assert len(files) == 2
    assert all((DOCS / file).exists() for file in files)


@pytest.mark.parametrize(("part", "text"), [(1, "1"), (1 / 8, "**1/8**"), (0.139, "**14%**"), (0.995, "1")])
def test_a_part_is_written_as_a_fraction_where_it_is_one(part, text):
    assert part_text(part) == text


# Workloads -------------------------------------------------------------------------------------------------------------

WORKLOADS = {workload.title: workload for workload in workloads()}
SMALL = [title for title, workload in WORKLOADS.items() if workload.gpus <= 2]
PAGE = (DOCS / "workloads.md").read_text(encoding="utf-8")


def check_workload(title):
    workload = WORKLOADS[title]
    assert row(workload) in PAGE, RENEW
    assert paragraph(workload) in PAGE, RENEW
    assert workload.is_right()
    wrong = replace(workload, holds=f"not ({workload.holds})")
    vars(wrong)["found"] = workload.found  # the same job: planned once
    assert not wrong.is_right()


def test_every_workload_is_on_the_page():
    assert len(WORKLOADS) == len(workloads()) >= 12
    assert PAGE.count("\n| ") == len(WORKLOADS) + 1
    assert all(f"**{title}.** {workload.do}" in PAGE for title, workload in WORKLOADS.items())


@pytest.mark.parametrize("title", SMALL)
def test_a_small_workload_is_planned_as_the_page_says(title):
    check_workload(title)


@pytest.mark.thorough
def test_the_page_of_workloads_is_what_the_planner_says_now():
    for title in WORKLOADS:
        check_workload(title)
    assert jobs.page() == PAGE, RENEW


@pytest.mark.parametrize("title", WORKLOADS)
def test_the_naive_and_the_usual_layout_are_of_the_job(title):
    workload = WORKLOADS[title]
    found = naive(workload.job)
    if found is not None:
        assert found.layout.world_size == workload.gpus
        assert found.num_bytes <= workload.job.room_bytes
    if workload.usual:
        usual = jobs.parse_layout(workload.usual)
        assert usual.world_size == workload.gpus
        assert jobs.why_illegal(workload.job, usual) is None


def test_a_gain_within_the_doubt_says_so():
    def of(seconds, doubt, dp=2):
        return Priced(Layout(dp), seconds, doubt, 1e9)

    assert gain(of(1.0, 0.1), of(1.1, 0.1, dp=4)) == "1.10 times (0.90 to 1.34), within the doubt"
    assert gain(of(1.0, 0.1), of(2.0, 0.1, dp=4)) == "2.00 times (1.64 to 2.44)"
    assert gain(of(1.0, 0.1), of(1.0, 0.1)) == "none: it is the same"


def test_the_published_runs_are_as_the_page_says():
    """Mixtures are among those held out; slow networks and GPUs of 24 GB are not among any."""
    from benchmarks.planner.published_runs import published_runs

    jobs_of_runs = [run.job() for run in published_runs()]
    mixtures = [run for run in published_runs() if run.held_out and run.job().shape.num_experts]
    assert len(mixtures) >= 5
    assert {job.machine.name.partition("-")[0] for job in jobs_of_runs} == {
        "a100",
        "h100",
        "h200",
        "h800",
        "b200",
        "gb200",
    }
    assert min(job.machine.memory_bytes for job in jobs_of_runs) == 40e9
    assert all(job.machine.cards_per_node * job.machine.card_bytes_per_s >= 200e9 for job in jobs_of_runs)


def test_what_fits_nowhere_is_said():
    workload = WORKLOADS["Fine-tuning 7B on 2 GPUs of 24 GB"]
    assert not plan(workload.job).best
    assert "nothing fits" in row(workload)
    assert "it would fit with gpus=8" in paragraph(workload)


# Tuning ----------------------------------------------------------------------------------------------------------------

WORDS, MEASURED = tuning._toml("tuning.toml")["step"], tuning._toml("measured.toml")


def test_the_walkthrough_is_written_from_what_was_measured():
    assert (DOCS / "tuning.md").read_text(encoding="utf-8") == tuning.page(), RENEW
    assert len(tuning.page().split()) < 900  # two pages
    assert MEASURED["machine"]
    assert (
        [step["name"] for step in WORDS] == list(SETTINGS) == [name for name in MEASURED if name != "machine"]
    )


def test_each_step_of_the_walkthrough_changes_one_thing():
    for before, after in zip(SETTINGS.values(), list(SETTINGS.values())[1:]):
        assert (
            sum(getattr(before, name) != getattr(after, name) for name in Setting.__dataclass_fields__) == 1
        )
        assert after.expected_s() <= before.expected_s()


def test_what_was_measured_is_the_evidence_that_the_words_name():
    """Of the stored figures: messages exposed, then fewer, then the largest, then hidden; then a reader, who goes."""
    start, once, larger, buckets, reader = (MEASURED[name] for name in SETTINGS)
    assert start["exposed_s"] > start["step_s"] / 2
    assert once["messages_s"] < start["messages_s"] / 3
    assert larger["hidden"] < 0.05 < 0.3 < buckets["hidden"]
    assert (buckets["data_rank"], buckets["data_wait"] > 0.1, reader["data_wait"] < 0.02) == (2, True, True)
    for before, after in zip((start, once, larger, buckets), (once, larger, buckets, reader)):
        assert after["step_s"] < before["step_s"]


def test_figures_of_a_trace_are_means_a_step():
    """Rank 0 sends 2 s, 1 s of it beside its arithmetic; rank 1 waits 3 of 12 s for its data."""
    spans = {
        0: [
            tuning.Span("compute", "backward", 0, 11),
            tuning.Span("communicate", "all_reduce", 10, 12, "dp"),
        ],
        1: [tuning.Span("wait", tuning.DATA, 0, 3), tuning.Span("communicate", "all_reduce", 10, 12, "dp")],
    }
    found = figures(spans)
    assert found["step_s"] == 12 / STEPS
    assert found["messages_s"] == 2 / STEPS
    assert found["exposed_s"] == pytest.approx(1.5 / STEPS)
    assert found["hidden"] == pytest.approx(0.25)
    assert (found["data_wait"], found["data_rank"]) == (0.25, 1)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "messages"), [("once", STEPS), ("buckets", STEPS * LAYERS)])
def test_the_walkthroughs_runs_send_what_they_say(name, messages):
    """One message a step, or one for each layer; and the page's own measuring writes what it reads."""
    import tomllib

    from minipar.runtime.launch import run

    spans = run(tuning._spans, SETTINGS[name], world_size=RANKS)
    for own in spans:
        assert sum(s.kind == "communicate" and "reduce" in s.name for s in own) == messages
    text = tuning.measured_text("a machine", {name: figures(dict(enumerate(spans)))})
    assert set(tomllib.loads(text)[name]) == set(MEASURED[name])


# Routing ---------------------------------------------------------------------------------------------------------------


def test_the_page_of_routing_options_is_what_was_measured():
    assert (DOCS / "routing.md").read_text(encoding="utf-8") == routing.page(), RENEW
    assert tomllib.loads(routing.measured_text(routing.stored())) == tomllib.loads(
        Path(routing.__file__).with_suffix(".toml").read_text(encoding="utf-8")
    )


def sent_as_predicted(runs) -> bool:
    """Whether each setting with a capacity sent the bytes that rows padded to it have."""
    settings = [replace(routing.MODEL, **routing.CHANGES[run.panel][run.label]) for run in runs]
    return all(
        run.kilobytes == pytest.approx(routing.padded_kilobytes(model))
        for run, model in zip(runs, settings)
        if model.capacity_factor is not None
    )


def test_the_sentences_about_routing_options_hold():
    runs = routing.stored().runs
    assert sent_as_predicted(runs)
    for panel in ("experts a token", "capacity factor"):
        drops = [run.drops for run in runs if run.panel == panel]
        assert drops == sorted(drops, reverse=True)
    assert len({run.kilobytes for run in runs if run.panel in ("router's noise", "z-loss's weight")}) == 1
    (heavy,) = (run for run in runs if (run.panel, run.label) == ("z-loss's weight", "0.1"))
    others = [run for run in runs if run != heavy]
    assert heavy.lowest > max(run.highest for run in others)
    losses = [run.loss for run in others]
    assert max(losses) - min(losses) <= max(run.highest - run.lowest for run in others)


def test_a_measurement_of_two_settings():
    changes = {"capacity factor": {"1.25": {}}, "experts a token": {"1": {}, "2": {"top_k": 2}}}
    runs = routing.measure(1, 1, changes, tell=lambda line: None)
    assert [(run.panel, run.label) for run in runs] == [
        (panel, label) for panel in changes for label in changes[panel]
    ]
    assert sent_as_predicted(runs)
    assert not sent_as_predicted([run._replace(kilobytes=2 * run.kilobytes) for run in runs])
    assert runs[0].loss == runs[1].loss  # equal settings are trained once


# Foreign code ----------------------------------------------------------------------------------------------------------

FOREIGN = (DOCS / "foreign_code.md").read_text(encoding="utf-8")
SAME_TORCH = pytest.mark.skipif(
    f"torch {foreign.TORCH} " not in FOREIGN, reason="the page is of another torch"
)
ADAPTERS = {f"{one.specification} in {one.file}": one for one in foreign.adapters()}


@SAME_TORCH
@pytest.mark.thorough
@pytest.mark.skipif(
    len(ADAPTERS) < len(foreign.adapters(installed=False)), reason="an adapter's package is not installed"
)
def test_the_page_of_foreign_code_is_what_the_judges_say():
    assert foreign.page() == FOREIGN, RENEW


@SAME_TORCH
@pytest.mark.parametrize("name", ["broadcast in collectives", "global_loss in loss", "attention in megatron"])
def test_a_row_of_foreign_code_is_what_the_judges_say(name):
    row, said = foreign.row(ADAPTERS[name])
    assert row in FOREIGN, RENEW
    assert said in FOREIGN, RENEW


@pytest.mark.parametrize("case", foreign.CASES, ids=lambda case: case.what)
def test_ddp_differs_from_one_process_as_the_page_says(case):
    found = foreign.gap(case)
    assert f"| {case.what} | {foreign.in_words(found)} | {case.why} |" in FOREIGN, RENEW
    assert (found < 1e-9) == case.equal


def test_each_adapter_that_is_a_file_is_on_the_page():
    assert {one.path for one in ADAPTERS.values()} <= set(foreign.FOLDER.glob("*.py"))
    assert all(f"../adapters/{file.name}" in FOREIGN for file in foreign.FOLDER.glob("*.py"))
