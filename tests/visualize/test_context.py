import pytest

from minipar.config.context_limits import LAYOUTS
from minipar.context import causal_work
from minipar.visualize.context import balance_figure, draw_balance, work_in_blocks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bars_are_the_work_of_the_ranks(layout):
    for rank, steps in enumerate(work_in_blocks(4, layout, tokens=8)):
        assert sum(steps) * 64 == causal_work(32, rank, 4, layout)


def test_a_figure_shows_each_layout_and_each_rank(tmp_path):
    figure = balance_figure(3, ("zigzag", "contiguous"))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["zigzag", "contiguous", "", ""]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rank 0", "rank 1", "rank 2"]
    assert draw_balance(tmp_path / "balance.svg", size=1).read_text().startswith("<?xml")


def test_more_ranks_than_colours_are_refused():
    with pytest.raises(ValueError, match="size=9 ranks have no colours of their own; use 1 to 8"):
        balance_figure(9)
