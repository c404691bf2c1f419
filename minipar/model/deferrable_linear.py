"""A linear layer whose weight gradient can be deferred.

The backward of y = x w^T is two independent products: dx = dy w, which the backward of the layer below needs, and
dw = dy^T x, which nothing needs until the optimizer steps. A pipeline can compute dw later, to fill its idle time. One
autograd function serves both cases, so a backward in two halves (I, W) runs the same products as a whole one (B) and
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.model.overrides import GRADIENT_RECEIVER


class WeightGradients:
    """A queue of the weight-gradient products that the backward has deferred, in the order of that backward.

        queue = WeightGradients()
        defer_weight_gradients(model, queue)
        model.loss(tokens, targets).backward()     # input gradients only
        later = queue.pop_all()                    # this microbatch's products
        for product in later: product()            # adds the weights' gradients

    An entry is a function without arguments. It keeps the layer's x and dy in memory until the entry is deleted.
    """

    def __init__(self):
        self._products: list[Callable[[], None]] = []
        self.anchor = torch.empty(0, requires_grad=True)  # makes an output require a gradient; see `linear`

    def put(self, product: Callable[[], None]) -> None:
        # backward may run on a thread of its own (CUDA); appending to a list is atomic
        self._products.append(product)

    def pop_all(self) -> list[Callable[[], None]]:
        """Return all entries and empty the queue."""
        products, self._products = self._products, []
        return products

    def run(self) -> None:
        """Compute every entry and add it to its weight's gradient."""
        products = self.pop_all()
        while products:
            products.pop(0)()  # removed from the list, so that its tensors are freed

    def __len__(self) -> int:
        return len(self._products)


@torch.no_grad()
def accumulate_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to `parameter.grad` as autograd does, but run none of the parameter's hooks.

    A parameter with a gradient receiver (see `overrides.py`) gets the gradient through the receiver instead.
    """
    if (receive := getattr(parameter, GRADIENT_RECEIVER, None)) is not None:
        receive(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class _DeferredParameter(NamedTuple):
    """A parameter whose gradient is deferred to `queue`, wrapped so that autograd does not see the parameter.

    Otherwise autograd would run the parameter's hooks right after dx, before the gradient exists.
    """

    parameter: nn.Parameter
    queue: WeightGradients


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, anchor):
        ctx.deferred = [p if isinstance(p, _DeferredParameter) else None for p in (weight, bias)]
        trains_weight = ctx.deferred[0] is not None or ctx.needs_input_grad[1]
        weight, bias = (p.parameter if isinstance(p, _DeferredParameter) else p for p in (weight, bias))
        ctx.save_for_backward(x if trains_weight else None, weight if ctx.needs_input_grad[0] else None)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        later_weight, later_bias = ctx.deferred
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = (rows @ weight).view(*dy.shape[:-1], weight.shape[1])
        if later_weight is not None:
            later_weight.queue.put(
                partial(_accumulate_deferred, later_weight.parameter, _weight_gradient, rows, x)
            )
        elif ctx.needs_input_grad[1]:
            dw = _weight_gradient(rows, x)
        if later_bias is not None:
            later_bias.queue.put(partial(_accumulate_deferred, later_bias.parameter, _bias_gradient, rows))
        elif ctx.needs_input_grad[2]:
            db = _bias_gradient(rows)
        return dx, dw, db, None


def _weight_gradient(rows: Tensor, x: Tensor) -> Tensor:
    return rows.t() @ x.reshape(-1, x.shape[-1])


def _bias_gradient(rows: Tensor) -> Tensor:
    return rows.sum(0)


@torch.no_grad()
def _accumulate_deferred(parameter: nn.Parameter, gradient: Callable[..., Tensor], *inputs: Tensor) -> None:
    accumulate_gradient(parameter, gradient(*inputs))


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, deferred: WeightGradients | None = None
) -> Tensor:
    """Multiply by a weight, y = x w^T + b; the gradients of w and b go to the queue `deferred` if it is given.

    x  [..., D]    w  [F, D]    b  [F]    y  [..., F]

    backward   dx = dy w          [..., D]   at once; skipped where x needs no gradient
               dw = dy^T x        [F, D]     at once, or as an entry of `deferred`
               db = sum of dy     [F]        likewise

    Costs 2 N D F flops forward and twice that backward for N rows of x, deferred or not. Keeps x only where w is
    trained, and w only where x needs a gradient. A frozen weight makes no entry; neither does a weight that is not
    a leaf, since autograd has to pass its gradient on. A deferred gradient runs none of the parameter's hooks.
    """
    if deferred is None:
        return _Linear.apply(x, weight, bias, None)
    weight, bias = (
        _DeferredParameter(p, deferred) if p is not None and p.requires_grad and p.is_leaf else p
        for p in (weight, bias)
    )
    # The anchor makes y require a gradient where x does not, since autograd sees no parameter.
    return _Linear.apply(x, weight, bias, None if x.requires_grad else deferred.anchor)


class Linear(nn.Module):
    """A module around `linear`, with a weight [out_features, in_features] and an optional bias, filled by `initialize`.

    The forward reads `deferred`; its backward puts the weight gradient into that queue (None: computes it at once).
    """

    deferred: WeightGradients | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool = False, device=None, dtype=None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        bias_value = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", bias_value)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.deferred)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class TiedHead(nn.Module):
    """An output head that gets the embedding's weight at each call, so that the weight has one name and one owner."""

    deferred: WeightGradients | None = None

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, None, self.deferred)


def defer_weight_gradients(module: nn.Module, queue: WeightGradients | None) -> None:
    """Make every layer of `module` that can defer its weight gradients defer them to `queue`; None ends it.

    A layer that can defer them is one with an attribute `deferred`.
    """
    for layer in module.modules():
        if hasattr(layer, "deferred"):
            layer.deferred = queue
