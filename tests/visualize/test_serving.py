"""The pictures of a service have a row for each request that arrived, and its spans where they were."""

import pytest
from matplotlib.image import imread

from minipar.inference.events import Event, Kind, StepCounts
from minipar.visualize.serving import batching_figure, draw_batching, draw_service, service_figure

EVENTS = [
    Event(Kind.ARRIVE, 4, 0.0, 0.0),
    Event(Kind.ARRIVE, 0, 1.0, 1.0),
    Event(Kind.REFUSE, 2, 1.0, 1.0),
    Event(Kind.PREFILL, 4, 1.0, 2.0, 3),
    Event(Kind.DECODE, 4, 2.0, 4.0, 1),
    Event(Kind.PREEMPT, 0, 3.0, 3.0),
    Event(Kind.FINISH, 4, 4.0, 4.0, 2),
]
STEPS = [StepCounts(1.0, 2.0, 3, 1, 0, 1), StepCounts(2.0, 4.0, 1, 2, 3, 0)]


def test_rows_are_in_order_of_arrival_and_spans_where_they_were():
    rows, blocks = service_figure(EVENTS, STEPS, num_blocks=8).axes
    bars = {(b.get_x(), b.get_width(), round(b.get_y() + b.get_height() / 2)) for b in rows.patches}
    assert bars == {(0.0, 4.0, 0), (1.0, 1.0, 0), (2.0, 2.0, 0)}
    (lost,) = rows.lines
    assert (list(lost.get_xdata()), list(lost.get_ydata())) == ([3.0], [1])
    assert [label.get_text() for label in rows.get_yticklabels()] == ["4", "0"]
    kept, held = (list(patch.get_data().values) for patch in blocks.patches)
    assert (kept, held) == ([1, 5], [1, 2])
    assert [list(line.get_ydata()) for line in blocks.lines] == [[8, 8]]


def test_blocks_are_seen_where_the_cache_is_far_from_full():
    _, blocks = service_figure(EVENTS, STEPS, num_blocks=256).axes
    assert blocks.get_title("left") == "blocks of the cache, of 256"
    assert blocks.get_ylim()[1] < 10


def test_it_is_written_and_an_empty_log_is_refused(tmp_path):
    assert imread(draw_service(EVENTS, STEPS, tmp_path / "requests.png")).shape[0] > 200
    with pytest.raises(ValueError, match="no steps to draw"):
        draw_service([], [], tmp_path / "none.png")


def test_static_and_continuous_batches_are_drawn_on_one_axis_of_steps():
    """Two requests of 1 and 3 tokens, one place: continuous as in the log, static the same; two places: padding."""
    log = [
        Event(Kind.ARRIVE, 0, 0.0, 0.0),
        Event(Kind.ARRIVE, 1, 0.0, 0.0),
        Event(Kind.PREFILL, 0, 0.0, 0.1, 2),
    ]
    log += [Event(Kind.FINISH, 0, 0.1, 0.1, 1), Event(Kind.PREFILL, 1, 0.0, 0.1, 2)]
    log += [Event(Kind.DECODE, 1, 0.1, 0.4, 1), Event(Kind.DECODE, 1, 0.4, 0.6, 1)]
    log += [Event(Kind.FINISH, 1, 0.6, 0.6, 3)]
    steps = [StepCounts(begin, end, 1, 1, 0, 0) for begin, end in ((0.0, 0.1), (0.1, 0.4), (0.4, 0.6))]
    static, continuous = batching_figure(log, steps, batch_size=2).axes
    assert static.get_xlim() == continuous.get_xlim()
    assert static.get_title("left") == "static batches of 2: 3 steps, 67% of 2 places at work"
    padding = {
        (b.get_x(), b.get_width(), round(b.get_y() + b.get_height() / 2))
        for b in static.patches
        if b.get_hatch()
    }
    assert padding == {(1.0, 2.0, 0)}
    assert {(b.get_x(), b.get_x() + b.get_width()) for b in continuous.patches} == {
        (0, 1),
        (1, 2),
        (2, 3),
        (0, 3),
    }


def test_batches_are_written_and_a_log_without_an_end_is_refused(tmp_path):
    assert imread(draw_batching(EVENTS, STEPS, tmp_path / "batching.png", 2)).shape[0] > 150
    with pytest.raises(ValueError, match="no finished request"):
        batching_figure(EVENTS[:4], STEPS, 2)
