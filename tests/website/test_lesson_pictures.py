"""The explorables' recordings: each is the library's own number, and has an answer for every choice of the reader."""

from __future__ import annotations

from itertools import product

import pytest

from minipar.cost.memory import model_state_bytes
from minipar.cost.model_table import find_model
from minipar.mesh.mesh import Mesh
from minipar.schedules import make_schedule, simulate
from website import lesson_pictures as pictures
from website.answers import layout

WITHOUT_RANKS = ("buckets", "zero", "before_you_pay", "which_mesh", "pipelines", "zigzag", "meshes")


@pytest.mark.parametrize("name", WITHOUT_RANKS)
def test_there_is_an_answer_for_every_choice(name):
    recording = getattr(pictures, name)()
    places = product(*(range(len(field.values)) for field in recording.fields if field.is_key))
    assert set(recording.answers) == {" ".join(map(str, place)) for place in places}
    for field in recording.fields:
        assert 0 <= field.at < len(field.values)


def test_the_pipelines_are_the_simulators():
    recording = pictures.pipelines()
    schedule, p, m = recording.fields
    for i, name in enumerate(schedule.values):
        timeline = simulate(make_schedule(name, 3, 8))
        answer = recording.answers[f"{i} {p.values.index(3)} {m.values.index(8)}"]
        assert answer["bubble_over_total"] == timeline.bubble_over_total
        assert answer["peak_live"] == list(timeline.peak_live)
        spans = [[list(timeline.spans[action]) for action in own] for own in timeline.schedule.actions]
        assert [[action[3:] for action in own] for own in answer["ranks"]] == spans


@pytest.mark.parametrize("link", pictures.LINKS)
def test_one_bucket_is_the_backward_and_then_a_whole_ring(link):
    p, (alpha_s, bytes_per_s) = pictures.OVERLAP_RANKS, pictures.LINKS[link]
    got = pictures.overlap(pictures.LAYERS, link)
    backward_s = pictures.LAYERS * pictures.BACKWARD_S
    ring_s = 2 * (p - 1) * (alpha_s + pictures.LAYERS * pictures.LAYER_BYTES / p / bytes_per_s)
    assert got["backward_ms"] == pytest.approx(backward_s * 1e3)
    assert got["step_ms"] == pytest.approx((backward_s + ring_s) * 1e3)
    assert len(got["ranks"][1]) == 1


def test_buckets_go_in_turn_and_the_best_size_is_in_between():
    steps = {}
    for size in pictures.BUCKETS:
        got = pictures.overlap(size, "12.5 GB/s, 100 us a message")
        bars = got["ranks"][1]
        assert len(bars) == pictures.LAYERS // size
        assert all(before[4] <= after[3] + 1e-9 for before, after in zip(bars, bars[1:], strict=False))
        steps[size] = got["step_ms"]
    assert min(steps, key=steps.get) == 3


@pytest.mark.parametrize("model", ["llama-7b", "llama-70b"])
def test_zeros_bars_are_the_papers_formula(model):
    num_params, ranks = find_model(model).num_params, 16
    for stage, memory in enumerate(pictures.zero_stages(ranks, model)["stages"]):
        held = sum(memory[kind] for kind in ("parameters", "gradients", "optimizer state"))
        assert held == pytest.approx(model_state_bytes(num_params, ranks, stage), rel=1e-9)


def test_a_layout_is_the_planners_and_one_that_cannot_be_says_why():
    got = pictures.one_layout("llama-70b", "a100-80gb", 4, 2, 1)
    want = layout({"model": "llama-70b", "tp": 4, "pp": 2, "dp": 8, "zero": 1})
    assert got == {key: value for key, value in want.items() if key != "job"}
    assert "is not legal" in pictures.one_layout("llama-70b", "a100-80gb", 3, 1, 1)["error"]


@pytest.mark.parametrize(("name", "busiest"), [("contiguous", 1.75), ("zigzag", 1.0), ("striped", 1.0)])
def test_the_work_of_a_layout_is_all_of_the_mask(name, busiest):
    got = pictures.causal(name, 4, 512)
    assert sum(got["work"]) == 512 * 513 // 2
    assert [sum(q + 1 for q, rank in enumerate(got["owner"]) if rank == r) for r in range(4)] == got["work"]
    assert max(got["work"]) * 4 / sum(got["work"]) == pytest.approx(busiest, abs=0.01)


def test_choices_beyond_the_capacity_are_dropped():
    got = pictures.load_and_dropped([10, 0, 2, 4], 1.25)
    assert got == {"load": [10, 0, 2, 4], "capacity": 5, "dropped": 5}


def test_a_rank_of_a_mesh_has_the_librarys_groups():
    recording = pictures.meshes()
    for i, name in enumerate(recording.fields[0].values):
        grid = Mesh(16, **pictures.MESHES[name])
        groups = recording.answers[f"{i} 11"]["groups"]
        assert groups == {axis: list(grid.group(11, axis)) for axis in groups}


@pytest.mark.thorough
def test_the_balance_loss_evens_the_load_of_experts():
    recording = pictures.experts()
    last = len(recording.fields[1].values) - 1
    with_loss, without = (recording.answers[f"{i} {last} 1"] for i in (0, 1))
    assert sum(with_loss["load"]) == sum(without["load"]) == 256
    assert with_loss["dropped"] < without["dropped"]
