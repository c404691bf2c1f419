"""Emulate tensors of 4-bit and 8-bit floats with a scale per tensor or per block: each element becomes its decoded value.

    format   elements        scales                                                  bits per element
    fp8      e4m3 or e5m2    per tensor: float32                                     8
    mxfp8    e4m3 or e5m2    per 32 elements: a power of two                         8.25
    mxfp4    e2m1            per 32 elements: a power of two                         4.25
    nvfp4    e2m1            per 16 elements: e4m3, and per tensor: float32          4.5

Blocks are along the last dim; the last block may be shorter. If an element is nan or infinite, its whole block becomes nan
(in fp8 and nvfp4 the whole tensor), so that a training step notices it.

Sources: OCP Microscaling Formats (MX) Specification, version 1.0, sections 5 and 6.3; NVIDIA, Pretraining Large Language
Models with NVFP4, arXiv:2509.25149, section 2 and appendix C; for `ceil`, Recipes for Pre-training LLMs with MXFP8,
arXiv:2506.08027, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.extras.precision.formats import FORMATS, FloatFormat, power_of_two, round_to
from minipar.extras.precision.fp8_linear import round_to_fp8

MX_BLOCK, NVFP4_BLOCK = 32, 16
SCALE_EXPONENT = 127  # a scale of MX, of the type E8M0, is a power of two from 2^-127 to 2^127
FLOAT32_LARGEST = torch.finfo(torch.float32).max
PowerOfTwo = Literal["floor", "ceil"]
# Returns the largest magnitude (amax) of a whole tensor, given the amax of the part on this rank.
WholeAmax = Callable[[Tensor], Tensor]


def own_amax(amax: Tensor) -> Tensor:
    """Return `amax` itself, for a rank that has the whole tensor."""
    return amax


def mx_scales(amax: Tensor, elements: FloatFormat, power: PowerOfTwo = "floor") -> Tensor:
    """Return the power of two by which MX scales blocks whose largest magnitudes are `amax` (float64, any shape).

    floor  2^(floor(log2(amax)) - e), with 2^e the largest power of two of the element format, as in the specification.
           After scaling, the block's largest number may exceed the largest value of the element format; it is then clamped
    ceil   the smallest power of two with which no number exceeds that largest value

    Scales are clamped to 2^-127 ... 2^127; nan where amax is nan or infinite.
    """
    exponent = torch.frexp(amax).exponent - 1 - elements.largest_exponent
    if power == "ceil":
        exponent = exponent + (amax > elements.largest * power_of_two(exponent.clamp(-SCALE_EXPONENT, 1000)))
    exponent = torch.where(amax > 0, exponent, -SCALE_EXPONENT).clamp(-SCALE_EXPONENT, SCALE_EXPONENT)
    return torch.where(amax.isfinite(), power_of_two(exponent), torch.nan)


def round_mx(x: Tensor, elements: str, power: PowerOfTwo = "floor") -> Tensor:
    """Return x [..., D] rounded to MXFP8 or MXFP4: each 32 elements along the last dim share a power of two as their scale.

    elements  e4m3, e5m2 or e2m1
    result    [..., D], float64
    """
    blocks = _blocks(x, MX_BLOCK)
    scales = mx_scales(blocks.abs().amax(-1, keepdim=True), FORMATS[elements], power)
    return _joined(round_to(blocks / scales, FORMATS[elements]) * scales, x)


def round_nvfp4(x: Tensor, whole_amax: WholeAmax = own_amax) -> Tensor:
    """Return x [..., D] rounded to NVFP4: each 16 e2m1 elements have a scale in e4m3, and the tensor has one in float32.

        encode = 6 * 448 / amax(tensor)                      float32; the scale that would be stored is 1 / encode
        scale  = e4m3(amax(block) / 6 * encode)              so the scale of the block with the largest amax is 448
        result = e2m1(x / (scale / encode)) * scale / encode

    whole_amax  a collective, if ranks have parts of the tensor
    result      [..., D], float64; a block whose scale rounds to zero becomes zero
    """
    blocks = _blocks(x, NVFP4_BLOCK)
    of_blocks = blocks.abs().amax(-1, keepdim=True)
    amax = whole_amax(of_blocks.amax().float())
    largest = FORMATS["e2m1"].largest * FORMATS["e4m3"].largest
    # Divide by tensors: torch computes (Python number) / tensor as number * (1 / tensor), which rounds twice.
    encode = torch.where(amax > 0, (amax.new_tensor(largest) / amax).clamp(max=FLOAT32_LARGEST), 1.0)
    decode = torch.ones_like(encode) / encode
    wanted = of_blocks.float() / FORMATS["e2m1"].largest * encode
    scales = round_to(wanted.double(), FORMATS["e4m3"]) * decode
    rounded = round_to(blocks / torch.where(scales > 0, scales, 1.0), FORMATS["e2m1"]) * scales
    return _joined(torch.where(amax.isfinite(), rounded, torch.nan), x)


def round_fp8(x: Tensor, elements: str, whole_amax: WholeAmax = own_amax) -> Tensor:
    """Return x rounded to fp8 (e4m3 or e5m2), with a scale that maps the tensor's amax to the format's largest value.

    whole_amax  a collective, if ranks have parts of the tensor
    result      x's shape, float64
    """
    amax = whole_amax(x.abs().amax().float()).double()
    return torch.where(amax.isfinite(), round_to_fp8(x.double(), elements, amax), torch.nan)


def _blocks(x: Tensor, size: int) -> Tensor:
    """Return x [..., D] in float64 as blocks [..., D/size, size]; the last block is padded with zeros."""
    padded = F.pad(x.double(), (0, -x.shape[-1] % size))
    return torch.unflatten(padded, -1, (-1, size))


def _joined(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten(-2)[..., : like.shape[-1]]
