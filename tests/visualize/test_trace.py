"""Every span is in the picture once, at its time and in its rank's band."""

import pytest
from hypothesis import given
from matplotlib.image import imread

from minipar.support.trace import DATA, Span
from minipar.visualize.trace import Arrow, draw_trace, trace_figure
from tests.support.test_trace import spans_on_a_grid


@given(spans_on_a_grid, spans_on_a_grid)
def test_every_span_is_one_box_at_its_time(first, second):
    spans = [*first, *second]
    if not spans:
        return
    boxes = [box.get_extents() for box in _paths(trace_figure({0: first, 3: second}))]
    origin_s = min(s.start_s for s in spans)
    drawn = sorted((round(box.x0), round(box.x1)) for box in boxes)
    assert drawn == sorted(
        (round(1e3 * (s.start_s - origin_s)), round(1e3 * (s.end_s - origin_s))) for s in spans
    )


def test_lanes_of_a_rank_lie_below_its_own_and_ranks_apart():
    spans = [Span("compute", "forward", 0, 1), Span("communicate", "all_reduce dp", 0, 1, "comm 'world/dp'")]
    tops = [box.get_extents().y0 for box in _paths(trace_figure({0: spans, 1: spans}))]
    assert tops == sorted(tops)
    assert len(set(tops)) == 4


def test_the_hidden_part_of_communication_is_written_beside_each_rank():
    hidden = [Span("compute", "backward", 0, 4), Span("communicate", "all_reduce dp", 1, 3, "dp")]
    figure = trace_figure({0: hidden, 1: [Span("communicate", "all_reduce dp", 1, 3)], 2: hidden[:1]})
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert [text.split()[0] for text in texts if "hidden" in text] == ["100%", "0%"]
    assert texts.count("dp") == 1


def test_no_hidden_part_is_written_without_a_communication_lane():
    figure = trace_figure({0: [Span("compute", "forward", 0, 1), Span("communicate", "exchange", 1, 3)]})
    assert not any("hidden" in text.get_text() for text in figure.axes[0].texts)


def test_an_arrow_leads_from_the_senders_band_to_the_receivers():
    spans = {rank: [Span("communicate", "exchange", 1, 3)] for rank in (4, 7)}
    figure = trace_figure(spans, arrows=[Arrow(7, 1.0, 4, 3.0)])
    (arrow,) = [text for text in figure.axes[0].texts if getattr(text, "arrow_patch", None) is not None]
    (start_ms, sender), (end_ms, receiver) = arrow.xyann, arrow.xy
    assert (start_ms, end_ms) == (0, 2000)
    assert sender > receiver  # rank 4's band is drawn above rank 7's


def test_a_wait_for_data_has_its_name_and_others_have_none():
    figure = trace_figure({0: [Span("wait", DATA, 0, 4), Span("wait", "for B of microbatch 0", 4, 8)]})
    assert [text.get_text() for text in figure.axes[0].texts] == ["data", "rank 0"]


def test_a_file_is_written_and_nothing_to_draw_is_refused(tmp_path):
    path = draw_trace({0: [Span("wait", "all_reduce", 0, 1)]}, tmp_path / "new" / "trace.png", title="a wait")
    assert imread(path).shape[1] > 1000
    with pytest.raises(ValueError, match="no spans"):
        draw_trace({0: []}, path)


def _paths(figure):
    return [path for collection in figure.axes[0].collections for path in collection.get_paths()]
