from dataclasses import replace

import pytest

from minipar.cost.layout import Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.memory import ITEMS, worst_rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.planner import plan
from minipar.cost.scaling import bound_gpus, gpu_counts, scaling
from visualize.cost import (
    COLOURS,
    draw_plan,
    draw_scaling,
    layout_scaling_figure,
    plan_figure,
    scaling_figure,
)

JOB = Job(MODELS["llama-7b"], MACHINES["h100"], 8, 4096, 16)


def test_bars_are_the_items_of_memory_and_the_line_is_the_card():
    layouts = [parse_layout(text) for text in ("dp8-zero1", "dp4-tp2-zero1-full")]
    (axes,) = plan_figure(JOB, layouts).axes
    want = [v / 1e9 for layout in layouts for v in worst_rank_memory(JOB, layout)[1].values()]
    assert [patch.get_width() for patch in axes.patches] == pytest.approx(want)
    assert axes.lines[0].get_xdata()[0] == 80
    assert set(COLOURS) == set(ITEMS)


def test_the_front_is_drawn_below_all_that_fit(tmp_path):
    found = plan(JOB)
    _, axes = plan_figure(JOB, [fit.layout for fit in found.best[:2]], found).axes
    front = axes.lines[0].get_xydata()
    assert [tuple(point) for point in front] == [(b / 1e9, s) for s, b in found.frontier]
    assert len(axes.collections[0].get_offsets()) == len(found.fits)
    path = draw_plan(JOB, [found.best[0].layout], tmp_path / "plan.png", found)
    assert path.stat().st_size > 0


def test_a_scaling_curve_has_a_point_per_number_of_gpus(tmp_path):
    gpus = [8 * 2**k for k in range(12)]
    curves = {
        "weak": scaling(JOB, parse_layout("dp8-zero1"), gpus, weak=True),
        "strong": scaling(replace(JOB, batch=4096), parse_layout("dp8-zero1"), gpus, weak=False),
    }
    left, right = scaling_figure(curves).axes
    assert [len(line.get_xdata()) for line in left.lines] == [len(points) for points in curves.values()]
    assert left.lines[0].get_ydata()[0] == pytest.approx(1)
    assert list(right.lines[1].get_ydata()) == [p.communication for p in curves["strong"]]
    assert draw_scaling(curves, tmp_path / "scaling.svg").read_text().startswith("<?xml")
    left, right = scaling_figure(curves, (512, "few tokens")).axes
    assert left.lines[-1].get_xdata()[0] == right.lines[-1].get_xdata()[0] == 512
    assert right.texts[0].get_text() == "few tokens"


def test_where_gradients_can_no_longer_hide_is_said_in_the_picture():
    slow, layout = (
        replace(JOB, machine=replace(JOB.machine, card_bytes_per_s=1e9), batch=1024),
        parse_layout("dp8-zero1"),
    )
    _, right = layout_scaling_figure(slow, layout).axes
    bound = bound_gpus(slow, layout, gpu_counts(layout))
    assert right.lines[-1].get_xdata()[0] == bound
    assert f"{1024 * 4096 // bound:,} tokens" in right.texts[0].get_text()
    assert not layout_scaling_figure(replace(JOB, batch=2**20), layout).axes[1].texts
