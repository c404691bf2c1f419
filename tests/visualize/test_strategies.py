"""The picture of the strategy map shows the bytes that the page has."""

import pytest
from matplotlib.patches import Rectangle

from benchmarks.guide.strategies import strategies
from minipar.visualize.strategies import KINDS, STRATEGIES, Bars, bars_of, main, strategies_figure


def test_the_bars_are_the_pages_bytes():
    bars = bars_of("llama-7b")
    drawn = list(bars.values())
    of_page = [strategy for strategy in strategies() if strategy.model == "llama-7b"]
    assert len(drawn) == len(of_page) + 1  # one GPU comes first, and sends nothing
    assert drawn[0].sent_bytes == 0
    for bar, strategy in zip(drawn[1:], of_page):
        assert list(bar.held.values()) == list(strategy.held_bytes().values())
        assert bar.sent_bytes == strategy.sent_bytes()


def test_a_bar_is_as_long_as_its_bytes():
    bars = {"a": Bars(dict(zip(KINDS, (1e9, 2e9, 3e9, 4e9))), 5e9)}
    left, right = strategies_figure(bars, "title").axes
    widths = [patch.get_width() for patch in left.patches if isinstance(patch, Rectangle)]
    assert widths == [1, 2, 3, 4]
    assert [patch.get_width() for patch in right.patches] == [5]
    assert [text.get_text() for text in left.texts + right.texts] == [" 10", "5"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["a"]


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no strategies"):
        strategies_figure({}, "title")
    with pytest.raises(ValueError, match="its name says no format"):
        main(out=tmp_path / "strategies.txt")
    assert len(STRATEGIES) >= 10
