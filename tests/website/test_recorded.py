"""The recordings of collectives: only what a rank has is sent, and at the end all have what the collective promises."""

from __future__ import annotations

import pytest

from website.recorded import RECORDED, record, sizes_of


@pytest.mark.parametrize("label", RECORDED)
@pytest.mark.parametrize("p", [3, 4])
def test_a_recording_ends_with_what_the_collective_promises(label, p):
    if p not in sizes_of(label):
        p = sizes_of(label)[0]
    recording = record(label, p)
    has = [set(map(tuple, items)) for items in recording["start"]]
    sent = [0.0] * p
    for step in recording["steps"]:
        before = [set(items) for items in has]
        for message in step:
            items = set(map(tuple, message["items"]))
            assert items <= before[message["from"]]  # nobody passes on what arrives in the same step
            has[message["to"]] |= items
            sent[message["from"]] += message["share"]
    chunks = range(recording["chunks"])
    everything = {(c, r) for c in chunks for r in range(p)}
    for rank, items in enumerate(has):
        if label.startswith("all-reduce"):
            assert items == everything
        elif label.startswith("reduce-scatter"):
            assert items >= {(rank, r) for r in range(p)}
        elif label.startswith("all-gather"):
            assert items == {(c, c) for c in chunks}
        elif label.startswith("broadcast"):
            assert items == {(c, 0) for c in chunks}
        else:
            assert items >= {(rank, r) for r in range(p)}
    if label == "all-reduce, ring":
        assert sent == pytest.approx([2 * (p - 1) / p] * p)
        assert len(recording["steps"]) == 2 * (p - 1)
