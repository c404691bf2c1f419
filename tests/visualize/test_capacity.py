from dataclasses import replace

import pytest

from minipar.visualize import capacity
from minipar.visualize.capacity import Run, capacity_figure, draw_capacity, train_with


def test_every_run_is_a_point_a_bar_and_a_line():
    runs = [Run(0.5, [3.0, 2.0], [0.5, 0.3]), Run(None, [3.0, 1.0], [0.0, 0.0])]
    left, right, shares = capacity_figure(runs).axes
    assert list(left.lines[0].get_ydata()) == [2.5, 2.0]
    assert [bar.get_height() for bar in shares.patches] == pytest.approx([0.4, 0.0])
    assert [list(line.get_ydata()) for line in right.lines] == [[0.5, 0.3], [0.0, 0.0]]
    assert [t.get_text() for t in left.get_xticklabels()] == ["0.5", "room for all"]


def test_more_room_drops_fewer_tokens_and_full_room_drops_none(monkeypatch):
    monkeypatch.setattr(capacity, "MODEL", replace(capacity.MODEL, dim=16, hidden_dim=8, max_seq_len=32))
    little, more, all_ = (train_with(factor, steps=3) for factor in (0.5, 2.0, None))
    assert little.losses[0] != more.losses[0]
    assert min(little.dropped) >= 0.5  # half the room
    assert max(more.dropped) < min(little.dropped)
    assert all_.dropped == [0.0] * 3


def test_the_command_writes_the_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(capacity, "MODEL", replace(capacity.MODEL, dim=16, hidden_dim=8, max_seq_len=32))
    capacity.main((1.0, None), steps=1, out=tmp_path / "capacity.png")
    assert (tmp_path / "capacity.png").stat().st_size > 1000
    assert "capacity factor room for all: loss" in capsys.readouterr().out


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no runs to draw"):
        draw_capacity([], tmp_path / "capacity.png")
    for options, says in (
        (dict(steps=0), "steps=0"),
        (dict(out=tmp_path / "capacity.txt"), "its name says no format"),
        (dict(factors=(1.0, 0.0)), "capacity_factor=0.0"),
    ):
        with pytest.raises(ValueError, match=says):
            capacity.main(**options)
