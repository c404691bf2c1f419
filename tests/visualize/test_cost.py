import pytest

from minipar.cost.doubt import doubt
from minipar.cost.layout import Job, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.memory import ITEMS, worst_rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.planner import plan
from minipar.cost.timing import PARTS, step_time
from minipar.visualize.cost import (
    COLOURS,
    PART_STYLES,
    draw_plan,
    plan_figure,
)

JOB = Job(MODELS["llama-7b"], MACHINES["h100"], 8, 4096, 16)


def widths(axes):
    return [patch.get_width() for patch in axes.patches]


def test_bars_are_the_items_of_memory_and_the_line_is_the_gpu():
    layouts = [parse_layout(text) for text in ("dp8-zero1", "dp4-tp2-zero1-full")]
    memory, _ = plan_figure(JOB, layouts).axes
    items = [worst_rank_memory(JOB, layout)[1] for layout in layouts]
    want = [item[kind] / 1e9 for kind in COLOURS for item in items if any(i[kind] for i in items)]
    assert widths(memory) == pytest.approx(want)
    assert memory.lines[0].get_xdata()[0] == 80
    assert set(COLOURS) == set(ITEMS)


def test_bars_are_the_parts_of_a_step_and_a_line_is_their_doubt():
    layouts = [parse_layout(text) for text in ("dp4-tp2-zero1-full", "dp8-zero3", "dp2-pp4-zero1")]
    _, time = plan_figure(JOB, layouts).axes
    assert set(PART_STYLES) == set(PARTS)
    assert sum(widths(time)) == pytest.approx(sum(step_time(JOB, layout).total for layout in layouts))
    names = {text.get_text() for text in time.get_legend().get_texts()}
    assert names == set(PARTS) - {"cp", "ep"}
    for line, layout in zip(time.lines, layouts, strict=True):
        low, high = line.get_xdata()
        assert high / low == pytest.approx((1 + doubt(JOB, layout)) / (1 - doubt(JOB, layout)))


def test_the_front_is_drawn_below_all_that_fit(tmp_path):
    found = plan(JOB)
    _, _, axes = plan_figure(JOB, [fit.layout for fit in found.best[:2]], found).axes
    front = axes.lines[0].get_xydata()
    assert [tuple(point) for point in front] == [(b / 1e9, s) for s, b in found.frontier]
    assert len(axes.collections[0].get_offsets()) == len(found.fits)
    path = draw_plan(JOB, [found.best[0].layout], tmp_path / "plan.png", found)
    assert path.stat().st_size > 0
