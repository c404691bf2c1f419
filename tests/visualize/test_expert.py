import pytest
import torch

from minipar.model import MoE, MoEMetrics
from minipar.model.groups import RoutingGroups
from minipar.visualize.expert import draw_loads, draw_queues, load_figure, queue_figure


def metrics(load, kept):
    zero = torch.zeros(())
    return MoEMetrics(zero, zero, torch.tensor(load), torch.tensor(kept), sum(load), zero, zero)


def test_choices_are_boxes_and_dropped_ones_hatched_past_a_line():
    moe, x = MoE(4, 3, 4, 2, 0.75), torch.randn(1, 12, 4)
    routing = moe.route(moe.router(x, torch.arange(12), torch.arange(1)), RoutingGroups(1, 12, 12))
    figure = queue_figure(routing.expert.tolist(), routing.kept.tolist(), capacity=5)
    (axes,) = figure.axes
    hatched = [box for box in axes.patches if box.get_hatch()]
    assert len(hatched) == int((~routing.kept).sum())
    assert all(box.get_x() > 5 for box in hatched)
    assert sum(bool(t.get_text()) for t in axes.texts) == 24
    assert len(axes.patches) - len(hatched) == 4 * 5


def test_shares_fill_the_whole_height_at_every_step():
    figure = load_figure({"balanced": [metrics([2, 2], [2, 2])] * 3, "not": [metrics([4, 0], [2, 0])] * 3})
    top = figure.axes[0].collections
    last = top[-1].get_paths()[0].vertices
    assert last[:, 1].max() == pytest.approx(1.0)
    drops = [axes.lines[0].get_ydata() for axes in figure.axes[2:]]
    assert list(drops[0]) == [0.0] * 3
    assert list(drops[1]) == [0.5] * 3


def test_files_are_written_and_nothing_to_draw_is_refused(tmp_path):
    assert draw_queues([[0], [1]], [[True], [False]], 1, tmp_path / "queues.png").stat().st_size > 1000
    assert draw_loads({"a run": [metrics([1, 3], [1, 2])]}, tmp_path / "loads.svg").exists()
    with pytest.raises(ValueError, match="no metrics to draw"):
        load_figure({})
