"""Sketches: sums of sketches, and what can be recovered."""

from math import ceil

import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.extras.compress import Sketch
from tests.examples import examples


def places_of(n: int, count: int, seed: int) -> torch.Tensor:
    places = torch.zeros(n, dtype=torch.bool)
    places[torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:count]] = True
    return places


def num_cells(n: int, ratio: float) -> int:
    return 3 * ceil(ratio * n / 3)


def whole_numbers(places: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1000, 1000, (len(places),), generator=generator).double() * places


LOAD = 0.818  # kept elements a cell, below which all can be recovered


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
