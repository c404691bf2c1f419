"""Rounded at random, numbers are right on average, and the same wherever they are rounded."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.extras.precision.stochastic_rounding import stochastic_round
from tests.strategies import seeds


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 numbers next to x, towards zero and away from it."""
    toward = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    away = ((x.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    return toward, torch.where(toward == x, x, away)


@given(seed=seeds)
def test_every_number_becomes_one_of_its_neighbours(seed):
    x = torch.randn(256, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-40, 30, 256)
    toward, away = neighbours(x)
    found = stochastic_round(x, (seed, 1)).float()
    assert ((found == toward) | (found == away)).all()
    exact = x.bfloat16()
    assert torch.equal(stochastic_round(exact.float(), (seed, 2)), exact)


@pytest.mark.parametrize("x", [1.001, -3.14159, 1e-3, 1.0 + 2**-14, 6e-40])
def test_the_mean_of_many_roundings_is_the_number_itself(x):
    n = 100_000
    number = torch.tensor([x])
    toward, away = neighbours(number)
    step = (away - toward).double().item()
    p = (number.double() - toward.double()).item() / step
    mean = stochastic_round(number.expand(n).contiguous(), (5,)).double().mean().item()
    assert abs(mean - number.double().item()) < 5 * abs(step) * math.sqrt(p * (1 - p) / n)


@given(seed=seeds, cut=st.integers(0, 60))
def test_a_shard_rounds_as_in_the_whole_and_another_key_differs(seed, cut):
    x = torch.randn(60, generator=torch.Generator().manual_seed(seed))
    whole = stochastic_round(x, (seed, 3, 7))
    parts = stochastic_round(x[:cut], (seed, 3, 7)), stochastic_round(x[cut:], (seed, 3, 7), first=cut)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(stochastic_round(x.view(6, 10), (seed, 3, 7)), whole.view(6, 10))
    for other in ((seed, 4, 7), (seed, 3, 8), (seed + 1, 3, 7)):
        assert not torch.equal(stochastic_round(x, other), whole)


def test_updates_too_small_for_the_nearest_number_count_on_average():
    """500 updates of 1/1024 to a weight of 1: to nearest it stays 1, at random it comes to 1 + 500/1024 on average."""
    nearest = random = torch.ones(4000, dtype=torch.bfloat16)
    for step in range(500):
        nearest = (nearest.float() + 2**-10).bfloat16()
        random = stochastic_round(random.float() + 2**-10, (0, step))
    assert nearest.eq(1).all()
    spread = math.sqrt(500 * 2**-10 * 2**-7)  # each step: variance below (update) * (step of bfloat16)
    assert abs(random.double().mean().item() - (1 + 500 / 1024)) < 5 * spread / math.sqrt(4000)


def test_nan_and_infinity_stay_and_another_dtype_is_refused():
    found = stochastic_round(torch.tensor([math.nan, math.inf, -math.inf, 0.0]), (1,)).float()
    assert found[0].isnan()
    assert found[1:].tolist() == [math.inf, -math.inf, 0.0]
    with pytest.raises(ValueError, match=r"x\.dtype=torch\.float64: .*; use x\.float\(\)"):
        stochastic_round(torch.ones(1, dtype=torch.float64), (1,))
