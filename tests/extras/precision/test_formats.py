"""Rounding to a format takes the nearest of all its numbers, which are listed here from their bits."""

import math

import pytest
import torch

from minipar.extras.precision.formats import FORMATS, exponent_of, power_of_two, round_to

BITS = {"e2m1": (2, 1), "e4m3": (4, 3), "e5m2": (5, 2)}
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
each_format = pytest.mark.parametrize("name", FORMATS)


def numbers_of(name: str) -> list[float]:
    """All finite numbers without a sign, by their bit patterns in ascending order: the index of a number is its code."""
    exponent_bits, mantissa_bits = BITS[name]
    bias, found = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        found.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    no_number = {"e2m1": 0, "e4m3": 1, "e5m2": 4}[name]  # the highest codes are nan, or infinity
    return found[: len(found) - no_number]


def nearest(x: float, numbers: list[float]) -> float:
    """Search all numbers; of two equally near ones, take the one with an even code, and so with an even last bit."""
    size = min(abs(x), numbers[-1])  # far above the largest number, all would be equally far
    code = min(range(len(numbers)), key=lambda code: (abs(size - numbers[code]), code % 2))
    return math.copysign(numbers[code], x)


def hard_cases(name: str) -> list[float]:
    """Every number, every middle of two, what lies just beside a middle, and what is too small or too large."""
    numbers = numbers_of(name)
    middles = [(a + b) / 2 for a, b in zip(numbers, numbers[1:])]
    beside = [middle * (1 + sign * 1e-12) for middle in middles for sign in (-1, 1)]
    ends = [numbers[1] / 2**40, 5e-324, numbers[-1] * 1.0001, numbers[-1] * 2, 1e300]
    return [sign * x for x in (*numbers, *middles, *beside, *ends) for sign in (1.0, -1.0)]


def test_the_numbers_of_four_bits_are_the_published_eight():
    assert numbers_of("e2m1") == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@each_format
def test_the_nearest_of_all_numbers_is_taken_and_of_two_the_even(name):
    numbers, cases = numbers_of(name), hard_cases(name)
    random = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cases += (random * numbers[-1] / 3).tolist()
    found = round_to(torch.tensor(cases, dtype=torch.float64), FORMATS[name]).tolist()
    wanted = [nearest(x, numbers) for x in cases]
    assert [(x, math.copysign(1, x)) for x in found] == [(x, math.copysign(1, x)) for x in wanted]


@each_format
def test_infinity_saturates_and_nan_stays(name):
    x = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64)
    largest, smallest, no_number = round_to(x, FORMATS[name]).tolist()
    assert (largest, smallest) == (numbers_of(name)[-1], -numbers_of(name)[-1])
    assert math.isnan(no_number)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_the_numbers_and_the_rounding_are_torchs(name):
    codes = torch.arange(128, dtype=torch.uint8).view(TORCH_DTYPES[name]).double()
    assert codes[codes.isfinite()].tolist() == numbers_of(name)
    x = torch.tensor(hard_cases(name), dtype=torch.float64).float()  # torch rounds a float64 to float32 first
    x = x[x.abs() <= FORMATS[name].largest]
    assert torch.equal(round_to(x.double(), FORMATS[name]), x.to(TORCH_DTYPES[name]).double())


def test_a_halfway_number_rounded_up_would_be_noticed():
    """The planted fault: halves away from zero."""
    x = torch.tensor(2.5, dtype=torch.float64)
    assert round_to(x, FORMATS["e2m1"]).item() == 2
    assert (x / 1.0 + 0.5).floor().item() == 3 != nearest(2.5, numbers_of("e2m1"))


def test_powers_of_two_are_exact():
    exponents = torch.arange(-1022, 1024)
    assert power_of_two(exponents).tolist() == [2.0**e for e in exponents.tolist()]
    assert [exponent_of(x) for x in (448.0, 57344.0, 6.0, 1.0, 0.75)] == [8, 15, 2, 0, -1]
