"""Matrix products of 8-bit or 4-bit floats on any mesh, for `--products fp8`, `mxfp8`, `mxfp4` and `nvfp4`.

Each of a linear layer's three products rounds its two operands, in blocks along the dim over which the product sums, as
hardware requires. So each of x, w and dy is rounded twice, in blocks along different dims:

    y  = x w^T      sums over features D     x and w in blocks of D
    dx = dy w       sums over features F     dy and w in blocks of F
    dw = dy^T x     sums over tokens         dy and x in blocks of a sample's tokens

A mesh may split tensors, but not blocks: `choices.py` refuses a mesh that would. So the ranks together round a tensor
exactly as a single process does. For a format with a scale per tensor, the amax is all-reduced over the ranks that hold
parts of the tensor:

    operand   of a column-parallel layer   of a row-parallel layer
    x         dp x cp                      dp x cp, tp
    w         tp                           tp
    dy        dp x cp, tp                  dp x cp

Products are summed in float32 (float64 if that is the dtype), and kept in the run's dtype. This is emulation: the results
are those of the format, but speed and memory are those of the run's dtype. Text generation does not round operands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.extras.precision.block_scales import PowerOfTwo, WholeAmax, round_fp8, round_mx, round_nvfp4
from minipar.mesh import Mesh
from minipar.model import Attention
from minipar.model.deferrable_linear import Linear
from minipar.model.mlp import SwiGLU
from minipar.model.products import rows
from minipar.tensor_parallel.parallel_linear import ColumnParallelLinear, RowParallelLinear

# Rounds a tensor along its last dim. Arguments: the tensor, whether it is a gradient, how to get the whole tensor's amax.
RoundOperand = Callable[[Tensor, bool, WholeAmax], Tensor]
FEATURES, TOKENS = -1, -2  # dims of x and dy


def rounding_of(config: TrainConfig) -> RoundOperand:
    """Return the function with which a run's products round an operand."""
    name, options = config.products, config.options.get("products")
    scale: PowerOfTwo = getattr(options, "scale", "floor")
    if name == "nvfp4":
        return lambda x, is_gradient, whole_amax: round_nvfp4(x, whole_amax)
    if name == "mxfp4":
        return lambda x, is_gradient, whole_amax: round_mx(x, "e2m1", scale)
    of_gradients: str = getattr(options, "gradients", "e4m3")
    if name == "mxfp8":
        return lambda x, is_gradient, whole_amax: round_mx(x, of_gradients if is_gradient else "e4m3", scale)
    return lambda x, is_gradient, whole_amax: round_fp8(
        x, of_gradients if is_gradient else "e4m3", whole_amax
    )


class RoundedProducts:
    """The products of one layer. `x`, `w` and `dy` are, for each operand, the Comms whose ranks hold parts of it.

    For a format with a scale per tensor, each product makes, for each operand, one all-reduce of a float32 over each of the
    operand's Comms. The other formats send nothing.
    """

    def __init__(
        self, round_operand: RoundOperand, x: tuple[Comm, ...], w: tuple[Comm, ...], dy: tuple[Comm, ...]
    ):
        self.round_operand = round_operand
        self.amax_x, self.amax_w, self.amax_dy = (partial(amax_over, comms) for comms in (x, w, dy))

    def output(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        y = F.linear(self._x(x, FEATURES), self._w(w, 1)).to(x.dtype)
        return y if bias is None else y + bias

    def input_gradient(self, dy: Tensor, w: Tensor, add_to: Tensor | None = None) -> Tensor:
        dx = (rows(self._dy(dy, FEATURES)) @ self._w(w, 0)).to(dy.dtype)
        return dx if add_to is None else add_to.add_(dx)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return (rows(self._dy(dy, TOKENS)).t() @ rows(self._x(x, TOKENS))).to(dy.dtype)

    def _x(self, x: Tensor, dim: int) -> Tensor:
        return self._rounded(x, dim, False, self.amax_x)

    def _w(self, w: Tensor, dim: int) -> Tensor:
        return self._rounded(w, dim, False, self.amax_w)

    def _dy(self, dy: Tensor, dim: int) -> Tensor:
        return self._rounded(dy, dim, True, self.amax_dy)

    def _rounded(self, x: Tensor, dim: int, is_gradient: bool, whole_amax: WholeAmax) -> Tensor:
        rounded = self.round_operand(x.detach().movedim(dim, -1), is_gradient, whole_amax)
        return rounded.movedim(-1, dim).to(torch.promote_types(x.dtype, torch.float32))


def amax_over(comms: tuple[Comm, ...], amax: Tensor) -> Tensor:
    """Return the maximum of all ranks' `amax`, by an all-reduce over each of the Comms in turn; nan if one is nan."""
    for comm in comms:
        amax = comm.all_reduce(amax, op="max")
    return amax


def install(model: nn.Module, config: TrainConfig, mesh: Mesh | None) -> None:
    """Make every linear layer of attention and MLP in the model, or in this rank's stage, use rounded products, in place.

    The embedding, the norms, the attention core (queries with keys, scores with values) and the head stay as they are.
    """
    round_operand = rounding_of(config)
    data, tp = ((), ()) if mesh is None else _comms(mesh)
    for block in model.modules():
        if not isinstance(block, Attention | SwiGLU):
            continue
        for layer in block.children():
            if isinstance(layer, RowParallelLinear):
                layer.products = RoundedProducts(round_operand, x=data + tp, w=tp, dy=data)
            elif isinstance(layer, ColumnParallelLinear):
                layer.products = RoundedProducts(round_operand, x=data, w=tp, dy=data + tp)
            elif isinstance(layer, Linear):
                layer.products = RoundedProducts(round_operand, x=data, w=(), dy=data)


def _comms(mesh: Mesh) -> tuple[Any, Any]:
    """Return the Comm over dp x cp and that over tp, each as a tuple, which is empty for a Comm of one rank."""
    data, tp = mesh.comm("dp", "cp"), mesh.comm("tp")
    return tuple(comm for comm in (data,) if comm.size > 1), tuple(comm for comm in (tp,) if comm.size > 1)
