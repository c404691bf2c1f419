"""Pictures of pipelines: what is shaded is the bubble, and what is printed is the schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.schedules.costs import Costs
from minipar.schedules.one_f_one_b import interleaved, one_f_one_b
from minipar.schedules.registry import make_schedule
from minipar.schedules.simulate import simulate
from minipar.schedules.timeline import Timeline
from minipar.schedules.zero_bubble import zb_h2
from minipar.visualize.pipeline import bubble_gaps, draw_beside_predicted, draw_timeline, timeline_figure
from minipar.visualize.pipeline_command import timeline
from minipar.visualize.pipeline_text import grid_text
from tests.pipeline.strategies import costs, schedules


@given(st.data(), schedules(max_ranks=4, max_microbatches=6))
def test_the_shaded_part_is_the_bubble_over_total(data, schedule):
    timeline = simulate(schedule, data.draw(costs(schedule.num_stages)))
    shaded = sum(end - start for gaps in bubble_gaps(timeline) for start, end in gaps)
    whole = schedule.num_ranks * timeline.longest_own_span
    assert shaded / whole == pytest.approx(timeline.bubble_over_total)
    assert all(0 <= start < end <= timeline.makespan for gaps in bubble_gaps(timeline) for start, end in gaps)


def test_the_grid_of_1f1b_is_the_classic_one():
    assert grid_text(simulate(one_f_one_b(2, 3))).splitlines() == [
        "1f1b: 2 ranks, 3 microbatches; makespan 12; bubble 25.0% of total time, 33.3% of ideal time",
        "rank 0   F0 F1 ·  ·  B0 ── F2 B1 ── ·  B2 ──  live 2",
        "rank 1   ·  F0 B0 ── F1 B1 ── F2 B2 ── ·  ·   live 1",
    ]


def test_stages_of_a_rank_beyond_the_alphabet_are_named_aa_ab():
    _, row = grid_text(simulate(interleaved(1, 1, 28))).splitlines()
    forwards = [cell for cell in row.split() if cell.startswith("F")]
    assert forwards[25:] == ["F0z", "F0aa", "F0ab"]


def test_a_slice_has_its_own_number_and_the_command_divides_the_cost(tmp_path, capsys):
    timeline(("1f1b", "seq1f1b"), stages=2, microbatches=1, slices=2, costs=(2, 2, 2), out=tmp_path / "t.png")
    assert capsys.readouterr().out.split("\n\n")[1].splitlines() == [
        "seq1f1b: 2 ranks, 1 microbatches of 2 slices; makespan 9; bubble 33.3% of total time, 50.0% of ideal time",
        "rank 0   F0.0 F0.1 ·    ·    ·    B0.1 ──── B0.0 ────  live 2",
        "rank 1   ·    F0.0 F0.1 B0.1 ──── B0.0 ──── ·    ·     live 2",
    ]


@given(schedules(max_ranks=4, max_microbatches=6, max_slices=3))
def test_the_grid_names_every_action_once_and_idles_elsewhere(schedule):
    timeline = simulate(schedule)
    _, *rows = grid_text(timeline).splitlines()
    cells = [cell for row in rows for cell in row.split()[2:-2]]
    busy = [cell for cell in cells if cell != "·"]
    assert len(cells) == schedule.num_ranks * timeline.makespan
    assert len(busy) == sum(timeline.busy)
    assert len([cell for cell in busy if cell[0] in "FBIW"]) == len(timeline.spans)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_are_written_whatever_the_schedules(tmp_path, suffix):
    halves = Costs(0.5, 0.5, 0.5)
    timelines = [simulate(interleaved(3, 4, 2), halves), simulate(zb_h2(2, 3)), simulate(one_f_one_b(1, 1))]
    (file,) = draw_timeline(timelines, tmp_path / f"many{suffix}")
    assert file.stat().st_size > 10_000


def test_the_same_timeline_gives_the_same_file(tmp_path):
    timeline = simulate(one_f_one_b(2, 3))
    first, again = (draw_timeline(timeline, tmp_path / name)[1] for name in ("a", "b"))
    assert first.suffix == ".svg"
    assert first.read_bytes() == again.read_bytes()


def test_a_measured_timeline_is_drawn_in_the_same_form(tmp_path):
    predicted = simulate(one_f_one_b(2, 3))
    measured = {action: (1e3 + start, 1e3 + end + 0.1) for action, (start, end) in predicted.spans.items()}
    late = Timeline(predicted.schedule, measured)
    assert late.peak_live == predicted.peak_live
    assert late.makespan == pytest.approx(12.1)
    draw_timeline([predicted, late], tmp_path / "both.png", titles=["predicted", "measured"])


def test_the_command_prints_and_draws_schedules_on_one_axis(tmp_path, capsys):
    timeline(
        schedules=("1f1b", "interleaved"),
        stages=2,
        microbatches=4,
        chunks=3,
        costs=(3, 3, 3),
        out=tmp_path / "t",
    )
    printed = capsys.readouterr().out
    assert "1f1b: 2 ranks, 4 microbatches; makespan 45; bubble 20.0% of total" in printed
    assert "interleaved: 2 ranks, 4 microbatches; makespan 39; bubble 7.7% of total" in printed
    assert {file.name for file in tmp_path.iterdir()} == {"t.png", "t.svg"}


def test_the_command_refuses_what_does_not_fit_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="^chunks=2 stages a rank with schedule='1f1b'"):
        timeline(("1f1b",), 4, 8, chunks=2, out=tmp_path / "t")
    with pytest.raises(ValueError, match="^chunks=0; use a whole number of 1 or more$"):
        timeline(("interleaved",), 4, 8, chunks=0, out=tmp_path / "t")
    with pytest.raises(ValueError, match="no timelines to draw"):
        timeline((), 4, 8, out=tmp_path / "t")


def test_every_schedule_has_a_grid_and_a_picture_with_all_its_actions():
    names = ("gpipe", "breadth-first", "zb-h1", "zb-v", "dualpipe-v", "zb-auto")
    made = [make_schedule(name, 2, 2) for name in names]
    made.append(make_schedule("seq1f1b", 2, 2, slices=2))
    panels = timeline_figure([simulate(schedule) for schedule in made]).axes[::2]
    assert len(panels) == len(made)
    for schedule, panel in zip(made, panels):
        head = panel.get_title(loc="left")
        assert head == grid_text(simulate(schedule)).splitlines()[0]
        assert head.startswith(f"{schedule.name}: 2 ranks, 2 microbatches")
        numbers = sorted(text.get_text() for text in panel.texts)
        assert numbers == sorted(schedule.label(a.microbatch) for own in schedule.actions for a in own)


@pytest.mark.thorough
def test_a_schedule_can_be_run_and_drawn_below_what_was_predicted(tmp_path, capsys):
    timeline(("zb-h1",), stages=2, microbatches=3, measure=True, out=tmp_path / "both.png")
    printed = capsys.readouterr().out
    assert printed.count("zb-h1: 2 ranks, 3 microbatches; makespan") == 2
    assert (tmp_path / "both.png").stat().st_size > 10_000


def test_a_run_is_drawn_beside_the_simulation_of_its_own_costs(tmp_path):
    slow = {
        action: (2 * start, 2 * end) for action, (start, end) in simulate(one_f_one_b(2, 3)).spans.items()
    }
    (file,) = draw_beside_predicted(Timeline(one_f_one_b(2, 3), slow), tmp_path / "two.png")
    assert file.stat().st_size > 10_000
