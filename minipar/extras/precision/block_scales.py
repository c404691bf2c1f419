"""Tensors of 4 and 8-bit floats, scaled by tensor or by block, emulated: each number becomes the one that its bits mean.

    format   elements        a scale for                       bits a number
    fp8      e4m3 or e5m2    a tensor: float32                 8
    mxfp8    e4m3 or e5m2    32 numbers: a power of two        8.25
    mxfp4    e2m1            32 numbers: a power of two        4.25
    nvfp4    e2m1            16 numbers: e4m3, and a tensor: float32    4.5

Blocks are along the last dim; the last block may be shorter. A block in which a number is nan or infinite becomes nan
(of fp8 and nvfp4 the whole tensor), so that a training step sees it.

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
# Returns the largest number of a tensor of which this rank has a part, given that of the part.
WholeAmax = Callable[[Tensor], Tensor]


def own_amax(amax: Tensor) -> Tensor:
    """Return it: this rank has the whole tensor."""
    return amax


def mx_scales(amax: Tensor, elements: FloatFormat, power: PowerOfTwo = "floor") -> Tensor:
    """Return the power of two by which MX scales blocks whose largest magnitudes are `amax` (float64, any shape).

    floor  2^(floor(log2(amax)) - e), with 2^e the elements' largest power of two: the specification's. The largest number
           of a block may then exceed the elements' largest, and become it
    ceil   the smallest power of two with which nothing exceeds the elements' largest

    Scales are clamped to 2^-127 ... 2^127; nan where amax is nan or infinite.
    """
    exponent = torch.frexp(amax).exponent - 1 - elements.largest_exponent
    if power == "ceil":
        exponent = exponent + (amax > elements.largest * power_of_two(exponent.clamp(-SCALE_EXPONENT, 1000)))
    exponent = torch.where(amax > 0, exponent, -SCALE_EXPONENT).clamp(-SCALE_EXPONENT, SCALE_EXPONENT)
    return torch.where(amax.isfinite(), power_of_two(exponent), torch.nan)


def round_mx(x: Tensor, elements: str, power: PowerOfTwo = "floor") -> Tensor:
    """Return x [..., D] in MXFP8 or MXFP4: blocks of 32 numbers along the last dim share a power of two.

    elements  e4m3, e5m2 or e2m1
    result    [..., D], float64
    """
    blocks = _blocks(x, MX_BLOCK)
    scales = mx_scales(blocks.abs().amax(-1, keepdim=True), FORMATS[elements], power)
    return _joined(round_to(blocks / scales, FORMATS[elements]) * scales, x)


def round_nvfp4(x: Tensor, whole_amax: WholeAmax = own_amax) -> Tensor:
    """Return x [..., D] in NVFP4: blocks of 16 e2m1 numbers have a scale in e4m3, and the tensor one in float32.

        encode = 6 * 448 / amax(tensor)                      float32; the scale that is kept is 1 / encode
        scale  = e4m3(amax(block) / 6 * encode)              so that the largest block's is 448
        number = e2m1(x / (scale / encode)) * scale / encode

    whole_amax  a collective where ranks have parts of the tensor
    result      [..., D], float64; a block whose scale rounds to zero is zero
    """
    blocks = _blocks(x, NVFP4_BLOCK)
    of_blocks = blocks.abs().amax(-1, keepdim=True)
    amax = whole_amax(of_blocks.amax().float())
    largest = FORMATS["e2m1"].largest * FORMATS["e4m3"].largest
    # torch divides a Python number by a tensor as number * (1 / tensor), which rounds twice.
    encode = torch.where(amax > 0, (amax.new_tensor(largest) / amax).clamp(max=FLOAT32_LARGEST), 1.0)
    decode = torch.ones_like(encode) / encode
    wanted = of_blocks.float() / FORMATS["e2m1"].largest * encode
    scales = round_to(wanted.double(), FORMATS["e4m3"]) * decode
    rounded = round_to(blocks / torch.where(scales > 0, scales, 1.0), FORMATS["e2m1"]) * scales
    return _joined(torch.where(amax.isfinite(), rounded, torch.nan), x)


def round_fp8(x: Tensor, elements: str, whole_amax: WholeAmax = own_amax) -> Tensor:
    """Return x in fp8, e4m3 or e5m2, scaled so that the largest number of the tensor becomes the format's.

    whole_amax  a collective where ranks have parts of the tensor
    result      x's shape, float64
    """
    amax = whole_amax(x.abs().amax().float()).double()
    return torch.where(amax.isfinite(), round_to_fp8(x.double(), elements, amax), torch.nan)


def _blocks(x: Tensor, size: int) -> Tensor:
    """Return x [..., D] in float64 as blocks [..., D/size, size]; the last one is filled up with zeros."""
    padded = F.pad(x.double(), (0, -x.shape[-1] % size))
    return torch.unflatten(padded, -1, (-1, size))


def _joined(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten(-2)[..., : like.shape[-1]]
