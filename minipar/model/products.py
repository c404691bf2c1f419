"""The three matrix products of a linear layer, in one place, so that a run can replace them by name: `--products`.

    y = x w^T        dx = dy w        dw = dy^T x

`PLAIN` multiplies tensors as they are. An extra may round them first, to emulate hardware with fewer bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from minipar.config.train_config import TrainConfig


class Products(Protocol):
    """The matrix products of a linear layer.

    x  [..., D]    dy  [..., F]    w  [F, D], or a rank's part of it along one dim; the last dim but one of x and dy is
    the tokens of a sample

    output           y [..., F]
    input_gradient   dx [rows, D], added in place to `add_to` where that is given
    weight_gradient  dw [F, D]
    """

    def output(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def input_gradient(self, dy: Tensor, w: Tensor, add_to: Tensor | None = None) -> Tensor: ...

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor: ...


class PlainProducts:
    """Multiplies tensors as they are, in their own dtype."""

    def output(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, w, bias)

    def input_gradient(self, dy: Tensor, w: Tensor, add_to: Tensor | None = None) -> Tensor:
        return rows(dy) @ w if add_to is None else add_to.addmm_(rows(dy), w)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return rows(dy).t() @ rows(x)


PLAIN = PlainProducts()


def rows(x: Tensor) -> Tensor:
    """Return x [..., D] as [rows, D]."""
    return x.reshape(-1, x.shape[-1])


def keep(model: nn.Module, config: TrainConfig, mesh: Any) -> None:
    """Do nothing: `--products plain` loads this function. The functions of other choices set `products` of linear layers.

    model   the whole model, or this rank's stage after all strategies have split it
    config  the run's configuration
    mesh    the run's Mesh; None: one process
    """
