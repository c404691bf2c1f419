from matplotlib.figure import Figure

from minipar.mesh import Mesh
from minipar.visualize import mesh as pictures
from minipar.visualize.mesh import draw_axis_traffic, draw_groups, draw_step_parts, draw_two_losses


def drawn(monkeypatch) -> list[Figure]:
    figures = []
    monkeypatch.setattr(pictures, "write", lambda figure, path: figures.append(figure) or path)
    return figures


def test_a_group_has_one_colour_and_another_groups_another(monkeypatch, tmp_path):
    figures = drawn(monkeypatch)
    draw_groups(Mesh(8, dp=2, tp=4), {"tp": "one layer", "dp": "gradients"}, 4, tmp_path / "groups.png")
    for axes, axis in zip(figures[0].axes, ("tp", "dp")):
        boxes = sorted((patch for patch in axes.patches if patch.get_fill()), key=lambda patch: patch.get_x())
        colours = [box.get_facecolor() for box in boxes]
        for rank in range(8):
            alike = {r for r in range(8) if colours[r] == colours[rank]}
            assert alike == set(Mesh(8, dp=2, tp=4).group(rank, axis))


def test_bars_are_as_high_as_the_seconds_and_the_bytes(monkeypatch, tmp_path):
    figures = drawn(monkeypatch)
    draw_step_parts(["a", "b"], [{"x": 1.0, "y": 2.0}, {"x": 3.0, "y": 0.5}], "seconds", tmp_path / "a.png")
    draw_axis_traffic(
        ["m"],
        [dict(tp=1000, gradients=2000, cp=0, pp=0)],
        [dict(tp=1000, gradients=1900, cp=0, pp=0)],
        "b.png",
    )
    assert [patch.get_height() for patch in figures[0].axes[0].patches] == [1, 2, 3, 0.5]
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["3.00", "3.50"]
    assert [patch.get_height() for patch in figures[1].axes[0].patches] == [1, 2]


def test_two_losses_are_written(tmp_path):
    assert (
        draw_two_losses([2.0, 1.0], [2.0, 1.5], "a mistake", tmp_path / "losses.svg")
        .read_text()
        .startswith("<?xml")
    )
