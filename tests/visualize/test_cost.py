import pytest

from minipar.cost.layout import Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.memory import ITEMS, worst_rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.planner import plan
from visualize.cost import (
    COLOURS,
    draw_plan,
    plan_figure,
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
