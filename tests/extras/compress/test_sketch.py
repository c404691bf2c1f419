"""Sketches: sums of sketches, what can be recovered, thresholds, and the mean that ranks add up on the way."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.extras.compress import Sketch, SketchedMean
from minipar.extras.compress import sketched_mean as module
from minipar.extras.compress.choices import LOAD
from minipar.extras.compress.lossy_reference import lossy_rows
from minipar.extras.compress.sketch import ROWS, num_cells
from minipar.extras.compress.threshold import above_threshold, choose_by, largest
from minipar.support.chunks import chunk_sizes
from minipar.train.data.text import load_data
from minipar.train.verification.verify import _observe_rank
from tests.examples import examples
from tests.extras.compress.test_compress import vector


def places_of(n: int, count: int, seed: int) -> torch.Tensor:
    places = torch.zeros(n, dtype=torch.bool)
    places[torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:count]] = True
    return places


def whole_numbers(places: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1000, 1000, (len(places),), generator=generator).double() * places


# The sketch --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.floats(0.05, 1), st.integers(0, 200), st.integers(1, 5), st.integers(0, 99))
def test_the_sum_of_sketches_is_the_sketch_of_the_sum(n, ratio, count, ranks, seed):
    sketch = Sketch(places_of(n, count, seed), num_cells(n, ratio))
    xs = [whole_numbers(sketch.places, seed + r) for r in range(ranks)]
    assert torch.equal(sum(sketch.of(x) for x in xs), sketch.of(sum(xs)))


def peeled_one_by_one(sketch: Sketch) -> set[int]:
    """The elements that one finds by taking any element that is alone in a cell, until there is none."""
    left = {i: set(cells) for i, cells in zip(sketch.index.tolist(), sketch.cells.t().tolist())}
    found: set[int] = set()
    while True:
        held = [cell for cells in left.values() for cell in cells]
        alone = next((i for i, cells in left.items() if any(held.count(c) == 1 for c in cells)), None)
        if alone is None:
            return found
        found.add(alone)
        del left[alone]


@examples(40)
@given(st.integers(1, 60), st.floats(0.1, 1), st.integers(0, 60), st.integers(0, 999))
def test_what_can_be_peeled_is_recovered_the_rest_is_zero(n, ratio, count, seed):
    sketch = Sketch(places_of(n, count, seed), num_cells(n, ratio))
    x = whole_numbers(sketch.places, seed)
    assert set(sketch.recovered.nonzero().flatten().tolist()) == peeled_one_by_one(sketch)
    assert torch.equal(sketch.recover(sketch.of(x)), x * sketch.recovered)


def test_all_is_recovered_below_the_known_load_and_little_above():
    n, cells = 6000, num_cells(6000, 0.5)
    for load, least, most in (
        (0.7, 1.0, 1.0),
        (LOAD - 0.06, 1.0, 1.0),
        (LOAD + 0.04, 0.3, 0.6),
        (1.0, 0.0, 0.3),
    ):
        places = places_of(n, round(load * cells), 7)
        part = (Sketch(places, cells).recovered.sum() / places.sum()).item()
        assert least <= part <= most, load


def test_a_set_that_cannot_be_peeled_can_be_with_another_element():
    """The cells are drawn from the places, or two elements that share their three cells would wait for ever."""
    stuck = next(
        p for p in (places_of(9, 2, seed) for seed in range(999)) if not Sketch(p, 9).recovered.any()
    )
    more = [Sketch(stuck | (torch.arange(9) == i), 9) for i in range(9)]
    assert any(torch.equal(sketch.recovered, sketch.places) for sketch in more)


@given(st.integers(0, 5000), st.floats(0.001, 1))
def test_a_sketch_has_three_rows_and_at_least_its_ratio(n, ratio):
    cells = num_cells(n, ratio)
    assert cells % ROWS == 0
    assert ratio * n <= cells < ratio * n + ROWS + 1e-6


# The threshold -----------------------------------------------------------------------------------------------------


RUNGS = [float(f"{m}e{e}") for e in range(-30, 31) for m in (1, 2, 5)]


@given(st.integers(1, 300), st.floats(0.001, 1), st.floats(-6, 6), st.integers(0, 99))
def test_the_threshold_is_the_largest_that_keeps_the_fraction(n, fraction, scale, seed):
    x = vector(n, seed).double() * 10**scale
    kept = above_threshold(x, fraction)
    rung = max(t for t in RUNGS if (x.abs() >= t).sum() >= fraction * n)
    assert torch.equal(kept, x.abs() >= rung)
    exact = largest(x, fraction)
    assert exact.sum() == -int(-fraction * n // 1)
    assert (exact & ~kept).sum() == 0, "what top-k keeps is above the threshold"


def test_of_a_normal_vector_up_to_three_times_as_many_are_kept():
    assert not above_threshold(torch.zeros(9), 0.5).any()
    assert largest(torch.tensor([0.0, 3, 0]), 1.0).tolist() == [False, True, False]
    x = vector(20_000, 3).double()
    parts = [above_threshold(x * 1.1**i, 0.2).double().mean().item() for i in range(25)]
    assert min(parts) >= 0.2
    assert max(parts) == pytest.approx(0.61, abs=0.03)


# The mean over ranks -----------------------------------------------------------------------------------------------


def sketched(world, n, ratio, threshold, feedback, steps, sizes=None):
    mean = SketchedMean(world.using("ring"), choose_by(threshold, 0.2), ratio, feedback)
    mean.comm.traffic.reset()
    out = []
    for step in range(steps):
        x = vector(n, 10 * step + world.rank).double()
        if sizes is None:
            out.append(mean(x))
        else:
            parts = [{"w": piece} if len(piece) else {} for piece in x.split(sizes)]
            out.append(mean.scattered_means(parts).get("w", x[:0]))
    return (
        out,
        mean.comm.traffic.sent_bytes,
        phases_bytes(sizes or chunk_sizes(n, world.size), ratio, world.rank),
        mean.worker.residuals,
    )


def phases_bytes(sizes: list[int], ratio: float, rank: int) -> int:
    """Bytes that a rank sends of chunks of these sizes in the first three phases, by a ring, in float64."""
    bits, cells = [-(-n // 8) for n in sizes], [8 * num_cells(n, ratio) for n in sizes]
    # A ring's all-gather passes on every chunk but the next rank's, its reduce-scatter every chunk but the own.
    return 2 * sum(bits) - bits[rank] - bits[(rank + 1) % len(sizes)] + sum(cells) - cells[rank]


@examples(6)
@given(st.integers(1, 4), st.integers(1, 300), st.sampled_from([0.3, 0.6, 1.0]), st.booleans())
def test_all_ranks_get_the_same_bits_and_nothing_is_lost(size, n, ratio, threshold):
    steps = 3
    ranks = minipar.run(sketched, n, ratio, threshold, True, steps, world_size=size)
    means = ranks[0][0]
    assert all(torch.equal(a, b) for out, *_ in ranks for a, b in zip(out, means))
    true = sum(vector(n, 10 * step + r).double() for step in range(steps) for r in range(size)) / size
    found = sum(means)
    for *_, residuals in ranks:
        found = found + residuals.get(0, torch.zeros(n)) / size
    assert (found - true).abs().max() < 1e-12
    for rank, (_, sent, formula, _) in enumerate(ranks):
        if size > 1:  # the fourth phase sends what was recovered: where the mean is not zero
            formula *= steps
            for mean in means:
                recovered = [int(part.count_nonzero()) for part in mean.split(chunk_sizes(n, size))]
                formula += 8 * (sum(recovered) - recovered[(rank + 1) % size])
        assert sent == (formula if size > 1 else 0)


@examples(8)
@given(st.lists(st.integers(0, 90), min_size=2, max_size=4), st.booleans(), st.booleans())
def test_a_scattered_mean_has_its_bytes_and_loses_nothing(sizes, threshold, feedback):
    steps, size = 3, len(sizes)
    ranks = minipar.run(sketched, sum(sizes), 0.5, threshold, feedback, steps, sizes, world_size=size)
    true = (
        sum(vector(sum(sizes), 10 * step + r).double() for step in range(steps) for r in range(size)) / size
    )
    found = torch.cat([sum(out) for out, *_ in ranks])
    for _, sent, formula, residuals in ranks:
        assert sent == (steps * formula if sum(sizes) else 0)
        assert sum(map(len, residuals.values())) == (sum(sizes) if feedback else 0)
        found += residuals.get("w", torch.zeros(len(true))) / size
    if feedback and sum(sizes):
        assert (found - true).abs().max() < 1e-12


# Planted faults ----------------------------------------------------------------------------------------------------


def other_cells(self, index):
    return kept_cells(self, index).flip(1)


def adds_bits(self, chosen):
    """TAGC's code all-reduces the index by a sum of bytes: two ranks' bits of one element carry into the next."""
    bits = [module.pack_bits(x) for x in chosen]
    packed = self.comm.all_reduce(torch.cat(bits)).split([len(x) for x in bits])
    return [module.unpack_bits(part, len(x)) for part, x in zip(packed, chosen)]


def forgets_a_cell(self, sums):
    """Subtract a known element from one of its other cells only."""
    sums, x = sums.clone(), sums.new_zeros(len(self.places))
    for elements, cells in self._rounds:
        x[self.index[elements]] = sums[cells]
        sums.index_add_(0, self.cells[:2, elements].flatten(), -x[self.index[elements]].repeat(2))
    return x


def forgets_the_rest(self, parts):
    """Keep nothing of what was chosen but not recovered."""
    own, sketches = kept_own_mean(self, parts)
    left = self.worker.added_to([{key: torch.zeros_like(x) for key, x in part.items()} for part in parts])
    self.worker.keep(parts, [x.masked_fill(sketch.places, 0.0) for x, sketch in zip(left, sketches)])
    return own, sketches


kept_cells, kept_places, kept_own_mean, kept_recover = (
    Sketch._cells_of, SketchedMean._places, SketchedMean._own_mean, Sketch.recover
)  # fmt: skip
FAULTS = {
    "none": (Sketch, "recover", kept_recover, None),
    "cells of its own on rank 1": (Sketch, "_cells_of", other_cells, "averages, step 0"),
    "bits added": (SketchedMean, "_places", adds_bits, "averages, step 0"),
    "a cell forgotten": (Sketch, "recover", forgets_a_cell, "averages, step 0"),
    "the rest forgotten": (SketchedMean, "_own_mean", forgets_the_rest, "averages, step 1"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault):
    def faulty(world, config, text, fault):
        owner, name, function, _ = FAULTS[fault]
        kept = getattr(owner, name)
        if world.rank or "rank 1" not in fault:
            setattr(owner, name, function)
        try:
            return _observe_rank(world, config, text)
        finally:
            setattr(owner, name, kept)

    small = ModelConfig(dim=16, num_layers=1, num_heads=2, num_kv_heads=2, max_seq_len=16)
    own = {"sketch": 0.5, "fraction": 0.2, "threshold": True}
    config = TrainConfig(model=small, batch_size=2, seq_len=16, steps=2, verify_steps=0, trace_steps=0)
    config = config.choosing(dp=2, dtype="float64", compress=("tagc", own))
    text = load_data(config)[0]
    rows = lossy_rows(config, text, minipar.run(faulty, config, text, fault, world_size=2))
    assert next((row.what for row in rows if not row.equal), None) == FAULTS[fault][-1]
