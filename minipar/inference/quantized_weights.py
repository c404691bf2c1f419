"""Quantizes the layers' weights to 8 or 4 bits after loading: half, or little more than a quarter, of bfloat16's bytes.

Each row of a weight w [F, D] is cut into groups of g inputs. A group has one scale, and its weights become integers:

    scale = max |w| / (2^(bits-1) - 1)      code = round(w / scale)      w' = scale code

    8 bits   one group per row: g = D
    4 bits   g = 64 or 128: with one group per row, the row's largest weight would leave all others only seven steps

|w' - w| is at most half a scale. Scales are bfloat16, which has float32's range. So a weight takes bits + 16 / g bits: 4.25
with 4 bits in groups of 64.

Quantization is symmetric: 0 stays 0, and there is no zero point, unlike for keys and values (quantized_blocks.py). Weights
are spread about evenly around 0, so a zero point would shorten the step of a normally distributed group of 64 by only a
sixth, for another 16 / g bits. Without one, a kernel may also multiply by the codes first, and by the scale once per group.

Over tp, codes are split as weights are: a shard has its part of the codes and scales of the full weight. A column-parallel
shard has full rows. A row-parallel shard has a range of each row's inputs, which must begin and end at a group's border;
with 8 bits, a max all-reduce of F elements per matrix gives all ranks the largest weight of each row. So every mesh
multiplies by the same weights as one process that has quantized them, and generates the same text. Unquantized weights
generate another text.

The embedding, the head, the norms and the routers are not quantized.

Each product dequantizes its weight first. That saves memory, not time: it reads bits / 8 bytes per element, then writes e
bytes and reads them again. A kernel that dequantizes in registers reads only the bits / 8 bytes. A decode step, which takes
as long as reading the weights, would then be 16 / (bits + 16 / g) times as fast as in bfloat16: 3.8 times with 4 bits.

Source: LLM.int8(), arXiv:2208.07339, section 2 (one scale per row); GPTQ, arXiv:2210.17323, section 4 (groups). GPTQ has
the same format, but chooses the codes that minimise the error of the layer's output; here the nearest codes are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.mesh import Placement, place_whole, placement_of
from minipar.model.deferrable_linear import Linear
from minipar.model.grouped_mlp import Experts
from minipar.model.transformer import Transformer
from minipar.support.errors import divisors, one_of

BITS = (8, 4)
SPLIT_BY_INPUTS = ("o", "down")  # the row-parallel matrices of a layer


def weight_element_bits(bits: int, group: int) -> float:
    """Return the bits that a weight takes, including its share of the scale: bits + 16 / g."""
    return bits + 16 / group


def quantize_weight(
    weight: Tensor, bits: int, group: int, sharing_rows: Comm | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize a weight in groups of inputs.

    weight  [..., F, D]
    codes   [..., F, D] int8, or with 4 bits [..., F, D / 2] uint8: code + 8, two per byte, the first in the lower bits
    scales  [..., F, D / g] bfloat16

    sharing_rows  None, or the Comm of the ranks over which a group is split
    """
    most = 2 ** (bits - 1) - 1
    groups = weight.detach().unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1)
    if sharing_rows is not None:
        largest = sharing_rows.all_reduce(largest, op="max")
    scales = (largest.double() / most).bfloat16()
    step = scales.double()[..., None]
    steps = torch.where(step == 0, 0.0, groups.double() / step)
    codes = steps.round().clamp(-most, most).to(torch.int8).flatten(-2)
    if bits == 8:
        return codes, scales
    low, high = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, scales


def unpacked(codes: Tensor) -> Tensor:
    """Return the codes as int8, one per element."""
    if codes.dtype == torch.int8:
        return codes
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - 8


def dequantize_weight(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [..., F, D] of these codes and scales."""
    groups = unpacked(codes).to(dtype).unflatten(-1, (scales.shape[-1], -1))
    weight: Tensor = (groups * scales.to(dtype)[..., None]).flatten(-2)
    return weight


class RoundedWeight(nn.Module):
    """A parametrization whose buffers are codes and scales; each access to the module's weight dequantizes them."""

    def __init__(self, bits: int, group: int | None, width: int, dtype: torch.dtype, rows: Comm | None):
        super().__init__()
        self.bits, self.group, self.width, self.dtype, self.rows = bits, group, width, dtype, rows

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_weight(weight, self.bits, self.width, self.rows)

    def forward(self, codes: Tensor, scales: Tensor) -> Tensor:
        return dequantize_weight(codes, scales, self.dtype)


def matrices(model: Transformer) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the matrices of the layers, except the routers, as (name of the matrix, its module, name of the attribute)."""
    for name, module in model.layers.named_modules(prefix="layers"):
        if isinstance(module, Experts):
            yield from ((f"{name}.{own}", module, own) for own in ("gate", "up", "down"))
        elif isinstance(module, Linear) and not name.endswith("router.noise"):
            yield name, module, "weight"


def quantize_weights(model: Transformer, bits: int, group: int = 64, tp: Comm | None = None) -> Transformer:
    """Replace the matrices of the layers by their codes, in place and irreversibly; return the model.

    model  a whole model or a stage; with `tp`, this rank's shard of it
    group  with 4 bits, the number of inputs that share a scale; 8 bits have one scale per row

    Each access to a module's `weight` then dequantizes it. A model that is already quantized in this way is left as it is.
    Raises ValueError if a group would cross the end of a row or of its shard, or if the model is already quantized in
    another way.
    """
    _require_bits(bits)
    wanted = bits, None if bits == 8 else group
    found = {(m.bits, m.group) for m in model.modules() if isinstance(m, RoundedWeight)}
    if found == {wanted}:
        return model
    if found:
        raise ValueError(f"weight_bits={bits}: the weights are rounded already; load the model anew")
    place_whole(model)
    for name, module, own in list(matrices(model)):
        weight = getattr(module, own)
        width, rows = _group_of(name, placement_of(weight), *wanted, tp)
        delattr(module, own)
        module.register_buffer(own, weight.detach(), persistent=False)
        rounding = RoundedWeight(*wanted, width, weight.dtype, rows)
        parametrize.register_parametrization(module, own, rounding, unsafe=True)  # the dtype changes
    return model


def check_quantized_weights(config: ModelConfig, bits: int, group: int, tp: int = 1) -> None:
    """Raise ValueError if the weights of this model, split over tp, cannot be quantized in this way."""
    _require_bits(bits)
    for name, module, own in matrices(Transformer(config, device="meta")):
        width = getattr(module, own).shape[-1]
        split = tp if name.rpartition(".")[2] in SPLIT_BY_INPUTS else 1
        if bits == 4:
            _require_whole_groups(name, group, width, width // split)


def _group_of(
    name: str, placement: Placement, bits: int, group: int | None, tp: Comm | None
) -> tuple[int, Comm | None]:
    """Return how many inputs of a group this rank holds, and the tp Comm if a group is split over ranks, else None."""
    whole, own = placement.global_shape[-1], placement.length[-1]
    if group is None:
        return own, tp if own < whole else None
    _require_whole_groups(name, group, whole, own)
    return group, None


def _require_whole_groups(name: str, group: int, whole: int, own: int) -> None:
    fits = one_of(d for d in divisors(own) if d % 2 == 0) if own % 2 == 0 else "weight_bits=8"
    if group < 2 or group % 2 or whole % group:
        raise ValueError(f"weight_group={group} does not cut the {whole} inputs of {name}; use {fits}")
    if own % group:
        raise ValueError(
            f"weight_group={group}: a group of {name} crosses the cut over tp, {own} of {whole} inputs a rank; use {fits}"
        )


def _require_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"weight_bits={bits}; use {one_of(BITS)}")
