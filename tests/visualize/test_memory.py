import pytest

from minipar.visualize.memory import Bar, draw_memory, memory_figure

BARS = [
    Bar("DDP", {"parameters": 4000, "gradients": 4000, "optimizer state": 8000}, 16000),
    Bar("FSDP", {"parameters": 1000, "gradients": 1000, "optimizer state": 2000}),
]


def test_bars_show_what_is_held_and_the_mark_is_at_the_formula():
    (axes,) = memory_figure(BARS).axes
    heights = [patch.get_height() for patch in axes.patches]
    assert heights == [4.0, 4.0, 8.0, 1.0, 1.0, 2.0]  # kB
    assert [patch.get_y() for patch in axes.patches] == [0, 4.0, 8.0, 0, 1.0, 2.0]
    (mark,) = axes.collections
    assert [y for _, y in mark.get_segments()[0]] == [16.0, 16.0]
    assert {"16", "4"} <= {text.get_text() for text in axes.texts}


def test_a_picture_of_bars_is_written(tmp_path):
    assert draw_memory(BARS, tmp_path / "memory.svg").read_text().startswith("<?xml")


def test_bars_of_nothing_are_refused():
    with pytest.raises(ValueError, match="bars hold 0 kinds of bytes; use 1 to 4"):
        memory_figure([])
