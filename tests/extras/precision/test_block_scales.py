"""MX and NVFP4 tensors are those of their specifications, written out here number by number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.extras.precision.block_scales import mx_scales, round_fp8, round_mx, round_nvfp4
from minipar.extras.precision.formats import FORMATS
from tests.extras.precision.test_formats import nearest, numbers_of
from tests.strategies import seeds

NUMBERS = {name: numbers_of(name) for name in FORMATS}


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Numbers of many sizes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x * torch.exp(4 * torch.randn(shape, generator=generator, dtype=torch.float64))
    return x * (torch.rand(shape, generator=generator) > 0.1)


def blocks(row: list[float], size: int) -> list[list[float]]:
    return [row[i : i + size] for i in range(0, len(row), size)]


def mx_by_hand(block: list[float], elements: str, power: str) -> list[float]:
    """Section 6.3 of the specification: the largest power of two not above the amax, over that of the elements."""
    numbers, amax = NUMBERS[elements], max(abs(x) for x in block)
    if amax == 0:
        return [0.0] * len(block)
    if power == "floor":
        of_amax = max(e for e in range(-1074, 1024) if 2.0**e <= amax)
        exponent = of_amax - max(e for e in range(20) if 2.0**e <= numbers[-1])
    else:
        exponent = next((e for e in range(-127, 127) if amax <= numbers[-1] * 2.0**e), 127)
    scale = 2.0 ** max(-127, min(127, exponent))
    return [nearest(x / scale, numbers) * scale for x in block]


@given(
    seed=seeds,
    columns=st.integers(1, 70),
    elements=st.sampled_from(list(FORMATS)),
    power=st.sampled_from(["floor", "ceil"]),
    size=st.sampled_from([1.0, 1e-42, 1e35, 1e300, 1e-300]),
)
def test_mx_is_the_specification_by_hand(seed, columns, elements, power, size):
    x = draw(seed, 2, columns) * size
    wanted = [
        [y for block in blocks(row, 32) for y in mx_by_hand(block, elements, power)] for row in x.tolist()
    ]
    assert round_mx(x, elements, power).tolist() == wanted


def nvfp4_by_hand(x: torch.Tensor) -> list[list[float]]:
    single = lambda number: torch.tensor(number, dtype=torch.float32)  # noqa: E731
    amax = single(x.abs().max().item())
    if amax == 0:
        return torch.zeros_like(x).tolist()
    encode = single(6.0 * 448.0) / amax
    rows = []
    for row in x.tolist():
        rows.append([])
        for block in blocks(row, 16):
            wanted = single(max(abs(y) for y in block)) / single(6.0) * encode
            scale = nearest(wanted.item(), NUMBERS["e4m3"]) * (single(1.0) / encode).item()
            rows[-1] += [nearest(y / scale, NUMBERS["e2m1"]) * scale if scale else y * 0.0 for y in block]
    return rows


@given(seed=seeds, columns=st.integers(1, 40), size=st.sampled_from([1.0, 1e-30, 1e30]))
def test_nvfp4_is_its_description_by_hand(seed, columns, size):
    x = draw(seed, 3, columns) * size
    assert round_nvfp4(x).tolist() == nvfp4_by_hand(x)


@given(seed=seeds)
def test_a_part_with_the_tensors_amax_rounds_as_in_the_whole(seed):
    """The planted fault is its own amax, with which a part of small numbers rounds otherwise."""
    x = draw(seed, 4, 32)
    x[2:] *= 0.37
    x[0, 0] = 2 * x.abs().max() + 1
    whole = lambda amax: x.abs().max().float()  # noqa: E731
    for round_part in (round_nvfp4, lambda part, amax=lambda own: own: round_fp8(part, "e4m3", amax)):
        assert torch.equal(round_part(x[2:], whole), round_part(x)[2:])
        assert not torch.equal(round_part(x[2:]), round_part(x)[2:])


@pytest.mark.parametrize("elements", FORMATS)
def test_a_scale_is_a_number_of_the_type_e8m0(elements):
    amax = torch.cat(
        [torch.logspace(-300, 300, 400, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    )
    for power in ("floor", "ceil"):
        scales = mx_scales(amax, FORMATS[elements], power)
        assert torch.equal(scales.float().to(torch.float8_e8m0fnu).float().double(), scales)
    assert mx_scales(torch.tensor([math.inf, math.nan]).double(), FORMATS[elements]).isnan().all()


def test_what_floor_cuts_off_ceil_keeps():
    x = torch.tensor([7.9, 1.0])
    assert round_mx(x, "e2m1", "floor").tolist() == [6, 1]
    assert round_mx(x, "e2m1", "ceil").tolist() == [8, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_makes_its_block_or_tensor_nan(bad):
    x = torch.ones(1, 64)
    x[0, 3] = bad
    assert round_mx(x, "e4m3").isnan().tolist() == [[True] * 32 + [False] * 32]
    assert round_nvfp4(x).isnan().all()
    assert round_fp8(x, "e4m3").isnan().all()


def test_zeros_stay_and_small_blocks_of_nvfp4_vanish():
    x = torch.zeros(1, 64)
    assert torch.equal(round_nvfp4(x), x.double())
    assert torch.equal(round_mx(x, "e2m1"), x.double())
    x[0, 0], x[0, 32] = 1.0, 1e-7
    assert round_nvfp4(x)[0, 32] == 0
    assert round_mx(x, "e2m1")[0, 32] != 0


@pytest.mark.parametrize("elements", ["e2m1", "e4m3", "e5m2"])
def test_ceil_leaves_a_block_whose_largest_number_is_the_formats_own(elements):
    """The boundary met exactly: no larger scale is needed, and one would round the small numbers away."""
    largest = FORMATS[elements].largest
    amax = torch.tensor([largest, largest * (1 + 2**-40), 4 * largest], dtype=torch.float64)
    assert mx_scales(amax, FORMATS[elements], "ceil").tolist() == [1, 2, 4]
