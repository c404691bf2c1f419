"""The picture of a run shows its losses and the reference's, and says how far apart they are."""

import pytest
from matplotlib.image import imread

from minipar.visualize.training import draw_training, training_figure

METRICS = [dict(step=i, loss=5.0 / (i + 1), lr=0.1, tokens_per_s=1000.0) for i in range(10)]


def test_the_curves_are_the_losses():
    reference = [m["loss"] + 1e-3 for m in METRICS[:4]]
    loss, throughput, lr = training_figure(METRICS, {"one process": reference}).axes
    ours, theirs = loss.lines
    assert list(ours.get_ydata()) == [m["loss"] for m in METRICS]
    assert list(theirs.get_ydata()) == reference
    assert "one process (largest difference in loss 1.0e-03)" in theirs.get_label()
    assert [axes.get_title(loc="left") for axes in (throughput, lr)] == ["tokens a second", "learning rate"]


def test_losses_on_text_held_out_are_drawn_where_they_were_measured():
    metrics = [{**m, "eval_loss": 4.0} if m["step"] % 4 == 3 else m for m in METRICS]
    _, held_out = training_figure(metrics).axes[0].lines
    assert list(held_out.get_xdata()) == [3, 7]
    assert list(held_out.get_ydata()) == [4.0, 4.0]


def test_losses_alone_and_a_single_step_are_enough(tmp_path):
    path = draw_training([dict(step=0, loss=5.5)], tmp_path / "loss.png")
    assert imread(path).shape[0] > 300
    with pytest.raises(ValueError, match="no metrics"):
        draw_training([], path)
