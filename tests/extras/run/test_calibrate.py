"""A machine measured here: numbers from times, the file, and what the cost model makes of them."""

from dataclasses import replace
from importlib import import_module

import pytest

from benchmarks import predicted
from benchmarks.predicted import spearman
from minipar.cost.collectives import collective_s as ring_s
from minipar.cost.layout import Job, parse_layout, why_illegal
from minipar.cost.links import axis_links, collective_s, send_s
from minipar.cost.machines import COLLECTIVES, MACHINES, find_machine
from minipar.cost.model_table import MODELS
from minipar.cost.timing import step_time
from minipar.cost.work import layer_seconds
from minipar.extras.run import calibrate as measure

MEASURED = replace(
    MACHINES["h100"], name="mine", share=1.0, float32_slowdown=1.0, context_bytes=3e8,
    collectives={kind: [1e-5 * (i + 1), 1e-9 * (i + 1)] for i, kind in enumerate(COLLECTIVES)},
)  # fmt: skip


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 5])
def test_latency_and_bandwidth_are_found_again_from_two_times(kind, ranks):
    alpha, beta = 3e-5, 2e-9

    def seconds(num_bytes):
        return alpha + beta * num_bytes if kind == "send" else ring_s(kind, ranks, num_bytes, alpha, beta)

    small, large = ((n, seconds(n)) for n in (2**10, 2**23))
    assert measure.fit_pair(kind, ranks, small, large) == pytest.approx((alpha, beta))


def test_a_machine_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "mine.toml"
    measure.write_machine(path, MEASURED, {128: 1e9})
    assert find_machine(str(path)) == MEASURED
    assert "product of 128 x 128" in path.read_text()


def test_what_was_measured_replaces_the_links():
    job, layout = Job(MODELS["llama-7b"], MEASURED, 4, 512, 8), parse_layout("dp2-pp2")
    links = axis_links(MEASURED, layout, "dp")
    assert collective_s(MEASURED, links, "all_gather", 1e6) == pytest.approx(
        ring_s("all_gather", 2, 1e6, 3e-5, 3e-9), rel=1e-12
    )
    assert send_s(MEASURED, layout, 1e6) == pytest.approx(5e-5 + 5e-3)
    slower = replace(MEASURED, collectives=MEASURED.collectives | {"all_reduce": [1e-5, 1e-7]})
    assert step_time(replace(job, machine=slower), layout).total > step_time(job, layout).total


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("all_gather = ", "all_gathers = "), "collectives.all_gather=None; use"),
        (lambda text: text.replace("send = [5", "send = [-5"), "collectives.send=[-5"),
        (lambda text: text + "broadcast = [1, 1]\n", "collectives.broadcast is unknown; use all_reduce"),
        (lambda text: text.replace("share = 1.0", "share = 1.5"), "share=1.5; use a fraction"),
    ],
)
def test_a_file_with_a_wrong_number_says_which(tmp_path, change, says):
    path = tmp_path / "mine.toml"
    measure.write_machine(path, MEASURED)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError) as refused:
        find_machine(str(path))
    assert says in str(refused.value)


@pytest.mark.thorough
def test_this_machine_is_measured_with_every_step_told(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "SIZES", (16, 32))
    monkeypatch.setattr(measure, "LARGE_BYTES", 2**14)
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "ATTENTION", (1, 1, 16, 8))
    monkeypatch.setattr(measure, "measured_pair", lambda kind, ranks: (1e-5, 1e-9))  # refused if too noisy
    told, path = [], tmp_path / "local.toml"
    machine = measure.calibrate(path, ranks=2, on_progress=told.append)
    assert find_machine(str(path)) == machine
    assert set(machine.collectives) == set(COLLECTIVES)
    assert len(told) == 2 + 3 + len(COLLECTIVES)
    assert machine.gpus_per_node == 2
    assert 0 < machine.share <= 1


@pytest.mark.parametrize(("took", "share"), [(4.0, 0.25), (0.5, 1.0)])
def test_the_share_is_predicted_over_measured_time_at_most_one(tmp_path, monkeypatch, took, share):
    """`took` times as long as the cost model says; what is faster than its own products counts as all of them."""

    monkeypatch.setattr(
        measure, "_slowest", lambda ranks, what, *args: took if what is measure.model_s else 1e-3
    )
    monkeypatch.setattr(measure, "measured_pair", lambda kind, ranks: (1e-5, 1e-9))
    monkeypatch.setattr(measure, "small_model_s", lambda machine: 1.0)
    assert measure.calibrate(tmp_path / "local.toml", 2, lambda line: None).share == pytest.approx(share)


def test_the_small_models_time_is_a_step_without_its_update():
    job, layout = predicted.job_and_layout(measure.SMALL, MEASURED)
    step = step_time(job, layout)
    assert measure.small_model_s(MEASURED) == pytest.approx(step.total - step.parts["update"])


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert spearman([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)


def test_every_mesh_of_the_table_is_one_that_the_cost_model_knows():
    changes = [replace(predicted.RUN, **c) for c in predicted.CONFIGS] + [
        replace(predicted.SLEEPY, **c) for c in predicted.MESHES
    ]
    assert len(changes) >= 40
    for config in changes:
        job, layout = predicted.job_and_layout(config, MEASURED)
        assert why_illegal(job, layout) is None
        assert step_time(job, layout).total > 0
    block = predicted.sleepy_machine(MEASURED)
    job, layout = predicted.job_and_layout(predicted.SLEEPY, block)
    assert layer_seconds(job, layout.tokens(job), 1, experts=False).total == pytest.approx(predicted.BLOCK_S)


def test_bytes_taking_no_time_are_measured_again_or_refused(monkeypatch):
    module = import_module("minipar.extras.run.calibrate")
    seconds = iter([2e-3, 1e-3, 1e-3, 9e-3])  # of a small and a large message, twice
    monkeypatch.setattr(module, "_slowest", lambda *args: next(seconds))
    assert module.measured_pair("send", 2)[1] > 0
    assert next(seconds, None) is None
    monkeypatch.setattr(module, "_slowest", lambda *args: 1e-3)
    with pytest.raises(
        ValueError, match="^send of 8388608 bytes took no longer than of 1024, 3 times; nothing was"
    ):
        module.measured_pair("send", 2)
