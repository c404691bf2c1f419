"""A linear layer whose weight gradient can be deferred.

The backward of y = x w^T is two independent products: dx = dy w, which the backward of the layer below needs, and
dw = dy^T x, which nothing needs until the optimizer steps. A pipeline can compute dw later, to fill its idle time. One
autograd function serves both cases, so a backward split in two halves (I, W) runs the same products as an unsplit backward
(B), and gives bitwise equal results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.types import Device

from minipar.model import autocast
from minipar.model.overrides import GRADIENT_RECEIVER, BeforeAdding
from minipar.model.products import PLAIN, Products, rows

Product = Callable[[], None]  # computes a weight gradient, and adds it to `weight.grad`


class WeightGradients:
    """A queue of the weight-gradient products that the backward has deferred, in the order in which it reached them.

        queue = WeightGradients()
        defer_weight_gradients(model, queue)
        model.loss(tokens, targets).backward()     # input gradients only
        later = queue.pop_all()                    # this microbatch's products
        for product in later: product()            # adds the weights' gradients

    A product keeps the layer's x and dy in memory until it is deleted.
    """

    def __init__(self) -> None:
        self._products: list[Product] = []
        self.anchor = torch.empty(0, requires_grad=True)  # makes an output require a gradient; see `linear`

    def put(self, product: Product) -> None:
        # The backward may run on a thread of its own (CUDA); appending to a list is atomic.
        self._products.append(product)

    def pop_all(self) -> list[Product]:
        """Return all products, and empty the queue."""
        products, self._products = self._products, []
        return products

    def run(self) -> None:
        """Run every product."""
        products = self.pop_all()
        while products:
            products.pop(0)()  # removed from the list, so that its tensors are freed

    def __len__(self) -> int:
        return len(self._products)


@torch.no_grad()
def accumulate_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add `gradient` to `parameter.grad` as autograd does, but of the parameter's hooks run only `BeforeAdding`.

    A parameter with a gradient receiver (see `overrides.py`) gets the gradient through the receiver instead.
    """
    if (receive := getattr(parameter, GRADIENT_RECEIVER, None)) is not None:
        receive(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        for hook in (parameter._backward_hooks or {}).values():
            if isinstance(hook, BeforeAdding):
                hook(gradient)
        parameter.grad += gradient


class _DeferredParameter(NamedTuple):
    """A parameter whose gradient is deferred to `queue`, wrapped so that autograd does not see the parameter.

    Otherwise autograd would run the parameter's hooks right after dx, before the gradient exists.
    """

    parameter: Tensor
    queue: WeightGradients


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | _DeferredParameter,
        bias: Tensor | _DeferredParameter | None,
        anchor: Tensor | None,
        products: Products,
    ) -> Tensor:
        ctx.products = products
        ctx.deferred = [p if isinstance(p, _DeferredParameter) else None for p in (weight, bias)]
        trains_weight = ctx.deferred[0] is not None or ctx.needs_input_grad[1]
        w = weight.parameter if isinstance(weight, _DeferredParameter) else weight
        b = bias.parameter if isinstance(bias, _DeferredParameter) else bias
        ctx.save_for_backward(x if trains_weight else None, w if ctx.needs_input_grad[0] else None)
        return products.output(x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        later_weight, later_bias = ctx.deferred
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = ctx.products.input_gradient(dy, weight).view(*dy.shape[:-1], weight.shape[1])
        if later_weight is not None:
            later_weight.queue.put(
                partial(_accumulate_deferred, later_weight.parameter, ctx.products.weight_gradient, dy, x)
            )
        elif ctx.needs_input_grad[1]:
            dw = ctx.products.weight_gradient(dy, x)
        if later_bias is not None:
            later_bias.queue.put(partial(_accumulate_deferred, later_bias.parameter, _bias_gradient, dy))
        elif ctx.needs_input_grad[2]:
            db = _bias_gradient(dy)
        return dx, dw, db, None, None


def _bias_gradient(dy: Tensor) -> Tensor:
    return rows(dy).sum(0)


@torch.no_grad()
def _accumulate_deferred(parameter: Tensor, gradient: Callable[..., Tensor], *inputs: Tensor) -> None:
    accumulate_gradient(parameter, gradient(*inputs))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    deferred: WeightGradients | None = None,
    products: Products = PLAIN,
) -> Tensor:
    """Multiply by a weight, y = x w^T + b; the gradients of w and b go to the queue `deferred` if it is given.

    x  [..., D]    w  [F, D]    b  [F]    y  [..., F]    products  how matrices are multiplied

    backward   dx = dy w          [..., D]   at once; skipped where x needs no gradient
               dw = dy^T x        [F, D]     at once, or as a product in `deferred`
               db = sum of dy     [F]        likewise

    Costs 2 N D F flops forward and 4 N D F backward for N rows of x, deferred or not. Keeps x only where w is trained, and
    w only where x needs a gradient. Only gradients of trained leaf weights are deferred: a frozen weight has none, and
    for a weight that is not a leaf, as under torch.autocast, autograd must pass the gradient on. A deferred gradient runs
    none of the parameter's hooks.
    """
    x, weight, bias = autocast.cast(x, weight, bias)
    parameters: list[Tensor | _DeferredParameter | None] = [weight, bias]
    anchor = None
    if deferred is not None:
        parameters = [
            _DeferredParameter(p, deferred) if p is not None and p.requires_grad and p.is_leaf else p
            for p in (weight, bias)
        ]
        # The anchor makes y require a gradient where x does not, since autograd sees no deferred parameter.
        waits = any(isinstance(p, _DeferredParameter) for p in parameters)
        anchor = deferred.anchor if waits and not x.requires_grad else None
    y: Tensor = _Linear.apply(x, *parameters, anchor, products)  # type: ignore[no-untyped-call]
    return y


class Linear(nn.Module):
    """A module around `linear`, with a weight [out_features, in_features] and an optional bias; `initialize` fills them.

    The backward defers the weight gradient to the queue that was in `deferred` during the forward; without a queue, it
    computes the gradient at once.
    """

    deferred: WeightGradients | None = None
    products: Products = PLAIN
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        empty = partial(torch.empty, device=device, dtype=dtype)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(empty(out_features)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.deferred, self.products)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class TiedHead(nn.Module):
    """An output head that gets the embedding's weight at each call, so that the weight has one name and one owner."""

    deferred: WeightGradients | None = None

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, None, self.deferred)


@runtime_checkable
class Deferrable(Protocol):
    """A layer that can defer its weight gradients to the queue `deferred`; None: it computes them at once."""

    deferred: WeightGradients | None


def defer_weight_gradients(module: nn.Module, queue: WeightGradients | None) -> None:
    """Make every layer of `module` that can defer its weight gradients defer them to `queue`; None: stop deferring."""
    for layer in module.modules():
        if isinstance(layer, Deferrable):
            layer.deferred = queue
