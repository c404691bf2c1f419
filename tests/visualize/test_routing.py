"""The picture of a router's options has the figures of the page, each in its place."""

from pathlib import Path

import pytest

from benchmarks.guide import routing
from minipar.visualize.routing import Routed, main, routing_figure

RUNS = [
    Routed("k", "1", 2.0, 1.9, 2.1, 0.25, 100.0),
    Routed("k", "2", 2.2, 2.0, 2.3, 0.5, 200.0),
    Routed("factor", "1", 2.4, 2.4, 2.4, 0.0, 50.0),
]


def test_each_figure_is_drawn_in_the_column_of_its_option():
    figure = routing_figure(RUNS)
    loss, drops, sent = (figure.axes[row * 2] for row in range(3))
    assert list(loss.lines[0].get_ydata()) == [2.0, 2.2]
    assert [[y for _, y in line] for line in loss.collections[0].get_segments()] == [[1.9, 2.1], [2.0, 2.3]]
    assert [bar.get_height() for bar in drops.patches] == [0.25, 0.5]
    assert [text.get_text() for text in drops.texts] == ["25.0%", "50.0%"]
    assert [bar.get_height() for bar in sent.patches] == [100, 200]
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == ["k", "factor"]
    assert [label.get_text() for label in sent.get_xticklabels()] == ["1", "2"]


def test_the_runs_of_the_page_are_drawn(tmp_path):
    main(Path(routing.__file__).with_suffix(".toml"), tmp_path / "routing.svg")
    text = (tmp_path / "routing.svg").read_text()
    assert all(run.label in text for run in routing.stored().runs)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no runs to draw"):
        routing_figure([])
    with pytest.raises(ValueError, match="its name says no format"):
        main(out=tmp_path / "routing.txt")
