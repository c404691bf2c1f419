"""Floating-point formats of 4 to 8 bits, and rounding to the nearest value of a format.

           bits of exponent, mantissa   bias   smallest   largest   inf and nan
    e2m1   2, 1                         1      0.5        6         none
    e4m3   4, 3                         7      2^-9       448       nan
    e5m2   5, 2                         15     2^-16      57344     both

    number = (-1)^sign * 2^(exponent - bias) * 1.mantissa      exponent above 0
             (-1)^sign * 2^(1 - bias) * 0.mantissa             exponent 0: subnormal

Sources: OCP 8-bit Floating Point Specification, revision 1.0, section 4; OCP Microscaling Formats (MX) Specification,
version 1.0, section 5.3.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor


class FloatFormat(NamedTuple):
    """A signed floating-point format, given by its mantissa bits, its exponent bias and its largest finite value."""

    mantissa_bits: int
    bias: int
    largest: float

    @property
    def largest_exponent(self) -> int:
        """The exponent of the format's largest power of two."""
        return exponent_of(self.largest)


FORMATS = MappingProxyType(
    {"e2m1": FloatFormat(1, 1, 6.0), "e4m3": FloatFormat(3, 7, 448.0), "e5m2": FloatFormat(2, 15, 57344.0)}
)


def exponent_of(number: float) -> int:
    """Return floor(log2(number)) for a positive number, exactly."""
    return int(torch.frexp(torch.tensor(number, dtype=torch.float64)).exponent) - 1


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float64, exactly, for integer exponents from -1022 to 1023."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def round_to(x: Tensor, number_format: FloatFormat) -> Tensor:
    """Round each element of x to the nearest value of the format; ties go to the value with an even last bit.

    x, result  any shape, float64

    Saturates: elements above the format's largest value, also infinity, become that value. nan stays nan.
    """
    magnitude = x.abs()
    exponent = torch.frexp(magnitude).exponent - 1
    lowest = 1 - number_format.bias  # subnormal values have the spacing of the lowest exponent
    spacing = power_of_two(
        exponent.clamp(lowest, number_format.largest_exponent) - number_format.mantissa_bits
    )
    rounded = (magnitude / spacing).round() * spacing  # `round` rounds halves to even
    return rounded.clamp(max=number_format.largest).copysign(x)
