"""Spans, what is computed from them, the file Perfetto opens, and what a Comm records."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.support.trace import (
    DATA,
    Span,
    Trace,
    busy_s,
    chrome_events,
    find_data_wait,
    find_straggler,
    overlap_fraction,
    span,
    write_chrome_trace,
)

LANES = ("main", "stream")
LENGTH = 24  # of the grid on which spans are drawn, so that a brute force can count its cells

spans_on_a_grid = st.lists(
    st.builds(
        lambda kind, ends, lane: Span(kind, "x", float(min(ends)), float(max(ends)), lane),
        st.sampled_from(["compute", "communicate", "wait"]),
        st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)),
        st.sampled_from(LANES),
    ),
    max_size=12,
)


def cells(spans, *kinds, lanes=LANES) -> set[int]:
    """The unit cells of the grid that some span of these kinds and lanes covers."""
    return {
        cell
        for s in spans
        if s.kind in kinds and s.lane in lanes
        for cell in range(int(s.start_s), int(s.end_s))
    }


def overlap_by_cells(spans) -> float:
    communicating, computing = cells(spans, "communicate"), set()
    for lane in LANES:
        own = dict(lanes=(lane,))
        computing |= cells(spans, "compute", **own) - cells(spans, "communicate", "wait", **own)
    return len(communicating & computing) / len(communicating) if communicating else 0.0


@given(spans_on_a_grid)
def test_busy_time_and_overlap_are_what_counting_cells_gives(spans):
    for kind in ("compute", "communicate", "wait"):
        assert busy_s(spans, kind) == len(cells(spans, kind))
    assert overlap_fraction(spans) == pytest.approx(overlap_by_cells(spans), abs=1e-12)


@given(
    st.lists(
        st.builds(
            lambda kind, start_s, length_s, lane: Span(kind, "x", start_s, start_s + length_s, lane),
            st.sampled_from(["compute", "communicate", "wait"]),
            st.floats(0, 1e6),
            st.floats(0, 10),
            st.sampled_from(LANES),
        ),
        max_size=12,
    )
)
def test_overlap_is_between_none_and_all_whatever_the_times(spans):
    assert 0.0 <= overlap_fraction(spans) <= 1.0


def test_a_collective_on_the_compute_lane_is_not_hidden():
    backward = Span("compute", "backward", 0.0, 10.0)
    assert overlap_fraction([backward, Span("communicate", "all_reduce", 4.0, 6.0)]) == 0.0
    assert overlap_fraction([backward, Span("communicate", "all_reduce", 4.0, 6.0, "comm")]) == 1.0


def test_what_one_waits_for_is_not_hidden():
    """Broken on purpose by leaving out waits, this would be 1.0."""
    spans = [
        Span("compute", "step", 0.0, 10.0),
        Span("communicate", "all_reduce", 2.0, 8.0, "comm"),
        Span("wait", "all_reduce", 5.0, 8.0),
    ]
    assert overlap_fraction(spans) == 0.5


def test_a_span_is_recorded_also_when_its_body_raises():
    trace = Trace()
    with pytest.raises(KeyError), trace.span("compute", "forward"):
        raise KeyError
    (recorded,) = trace.spans
    assert (recorded.kind, recorded.name, recorded.lane) == ("compute", "forward", "main")
    assert recorded.end_s >= recorded.start_s


def test_nothing_is_recorded_where_there_is_no_trace():
    trace = Trace()
    with span(None, "compute", "forward"):
        pass
    with span(trace, "compute", "forward"):
        pass
    assert len(trace.spans) == 1


# The file -------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.integers(0, 7), spans_on_a_grid, max_size=3))
def test_the_chrome_trace_holds_every_span_exactly_once(spans_by_rank):
    events = chrome_events(spans_by_rank)
    lane_of = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    origin_s = min((s.start_s for spans in spans_by_rank.values() for s in spans), default=0.0)
    read_back = sorted(
        (e["pid"], e["cat"], e["name"], e["ts"], e["ts"] + e["dur"], lane_of[e["pid"], e["tid"]])
        for e in events
        if e["ph"] == "X"
    )
    wanted = sorted(
        (rank, s.kind, s.name, (s.start_s - origin_s) * 1e6, (s.end_s - origin_s) * 1e6, s.lane)
        for rank, spans in spans_by_rank.items()
        for s in spans
    )
    assert read_back == wanted
    assert processes == {rank: f"rank {rank}" for rank in spans_by_rank}


def test_the_file_is_json_of_the_documented_form(tmp_path):
    path = tmp_path / "trace.json"
    write_chrome_trace(path, {0: [Span("compute", "forward", 1.0, 1.5)]})
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms"
    assert {e["ph"] for e in content["traceEvents"]} == {"M", "X"}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in content["traceEvents"] if e["ph"] == "X")


# What a Comm records --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    """Spans of two ranks that reduced once synchronously, once asynchronously, and sent one message."""

    def work(world):
        unrecorded = world.all_reduce(torch.ones(3))
        trace = world.trace = Trace()
        world.all_reduce(torch.ones(3))
        group = world.subgroup(range(world.size), "gradients")
        if world.rank == 1:
            world.recv((1,), torch.float32, 0)  # hold rank 0's reduction back until it waits for it
            handle = group.all_reduce(torch.ones(3), async_op=True)
        else:
            handle = group.all_reduce(torch.ones(3), async_op=True)
            world.send(torch.ones(1), 1)
        handle.wait()
        world.trace = None
        world.all_reduce(unrecorded)
        return trace.spans

    return minipar.run(work, world_size=2)


def test_a_synchronous_operation_is_a_span_of_the_main_lane(recorded):
    for spans in recorded:
        first = spans[0]
        assert (first.kind, first.name, first.lane) == ("communicate", "all_reduce world", "main")


def test_an_asynchronous_operation_is_a_span_of_its_comms_lane(recorded):
    for spans in recorded:
        (lane,) = {s.lane for s in spans} - {"main"}
        assert lane == "comm 'world/gradients'"
        (there,) = [s for s in spans if s.lane == lane]
        assert (there.kind, there.name) == ("communicate", "all_reduce world/gradients")


def test_waiting_for_a_handle_is_a_main_lane_wait_until_it_ends(recorded):
    waits = [s for spans in recorded for s in spans if s.kind == "wait"]
    assert all((s.name, s.lane) == ("all_reduce world/gradients", "main") for s in waits)
    for spans in recorded:
        ended_s = next(s.end_s for s in spans if s.lane != "main")
        assert all(s.end_s >= ended_s for s in spans if s.kind == "wait")


def test_messages_are_spans_and_only_what_ran_while_recording_is(recorded):
    names = [sorted(s.name for s in spans if s.kind == "communicate") for spans in recorded]
    both = ["all_reduce world", "all_reduce world/gradients"]
    assert names == [[*both, "send world"], [*both, "recv world"]]


def test_a_straggler_is_the_rank_computing_longest_not_waiting():
    def spans(compute_s, wait_s):
        return [Span("compute", "F", 0, compute_s), Span("wait", "for B", compute_s, compute_s + wait_s)]

    traces = {0: spans(1.0, 3.0), 1: spans(4.0, 0.0), 2: spans(1.25, 2.75)}
    assert find_straggler(traces) == (1, 4.0 / 1.25)
    inside = [Span("compute", "backward", 0, 9), Span("communicate", "all_reduce", 1, 9)]
    assert find_straggler({**traces, 3: inside}).rank == 1
    assert find_straggler({0: spans(1, 1), 1: []}) is None


def a_step(read_s, compute_s, others_s=0.0):
    """A step of one rank: it waits for its batch, computes, waits for the other ranks."""
    ends = [read_s, read_s + compute_s, read_s + compute_s + others_s]
    return [
        Span("wait", DATA, 0.0, ends[0]),
        Span("compute", "B of microbatch 0", ends[0], ends[1]),
        Span("wait", "for B of microbatch 0", ends[1], ends[2]),
    ]


def test_waiting_for_data_is_counted_on_the_rank_that_waited_longest():
    traces = {0: a_step(1.0, 3.0, 4.0), 1: a_step(5.0, 3.0), 2: a_step(0.0, 3.0, 5.0)}
    assert find_data_wait(traces) == (1, 5.0 / 8.0)
    again = [Span("wait", DATA, 4.0, 6.0), *a_step(5.0, 3.0)]  # spans that overlap count once
    assert find_data_wait({0: a_step(1.0, 3.0, 4.0), 1: again}) == (1, 6.0 / 8.0)
    assert find_data_wait({0: [Span("wait", "for B", 0, 9)], 1: []}) is None
    assert find_data_wait({}) is None


def slow_on_rank_2(world):
    """By a clock of the rank's own, which goes on while it computes: a busy machine would slow down any rank."""
    trace, clock = Trace(), iter(range(100))
    trace.now = lambda: next(clock)
    world.trace = trace
    for _ in range(3):
        with trace.span("compute", "step"):
            for _ in range(9 if world.rank == 2 else 0):
                next(clock)
        world.all_reduce(torch.ones(4))
    return trace.spans


def test_a_rank_that_is_slow_is_named_by_a_real_trace():
    traces = dict(enumerate(minipar.run(slow_on_rank_2, world_size=4)))
    straggler = find_straggler(traces)
    assert straggler == (2, 10.0)
