"""`ShardGradient`: a `.grad` of which other ranks have the rest. It is a tensor like any other, but it has no norm.

Without it, torch.nn.utils.clip_grad_norm_ would silently clip by the norm of this rank's part, which differs between ranks,
and Adafactor and LBFGS would silently step by norms and dot products of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
from torch import Tensor

INSTEAD = (
    "use minipar.clip_grad_norm_(shards, max_norm, comm) to clip (the shards are ZeroOptimizer.shards, else the model's "
    "parameters; comm is all ranks that hold parts of the model), "
    "minipar.data_parallel.DynamicLossScaler in place of torch's GradScaler, and an optimizer that updates each element "
    "from that element alone, as Adam does, or DDP or WholeParameterZero, which cut no parameter"
)


class ShardGradient(Tensor):
    """A gradient of which this rank has a part, or what was computed from one: its norm and its dot product raise."""

    spreads = True  # whether what is computed from it is a ShardGradient, too

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in NORMS:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} was called on gradients of which this rank has a part; {INSTEAD}; "
                "gradient.as_subclass(torch.Tensor) has the norm of what this rank has of it"
            )
        if cls.spreads:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # Copied and saved as a plain tensor, since torch.load knows no other class: a momentum may be a ShardGradient.

    def __deepcopy__(self, memo: Any) -> Any:
        return self.as_subclass(Tensor).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class StageGradient(ShardGradient):
    """A complete gradient, but other ranks have those of other parameters: what is computed from it has a norm."""

    spreads = False


NORMS = {
    torch.norm,
    Tensor.norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    torch.dot,
    Tensor.dot,
    torch._foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_,
}


def as_shard_gradient(gradient: Tensor, is_part: bool = True) -> Tensor:
    """Return the gradient as a `ShardGradient`, or unchanged unless it `is_part` of one."""
    return gradient.as_subclass(ShardGradient) if is_part else gradient


def mark_gradient(tensor: Tensor, cls: type[ShardGradient] = ShardGradient) -> None:
    """Make a `.grad` a `ShardGradient`: the hook of parameters of which other ranks hold the rest."""
    if type(tensor.grad) is Tensor:
        tensor.grad = tensor.grad.as_subclass(cls)


@contextmanager
def trainable(tensor: Tensor) -> Iterator[bool]:
    """Let hooks be registered on a tensor that is frozen now, and may be trained later. Yields False if it cannot be."""
    trained = tensor.requires_grad
    can_train = (
        tensor.is_leaf and not tensor.is_inference() and (tensor.is_floating_point() or tensor.is_complex())
    )
    tensor.requires_grad_(can_train or trained)
    try:
        yield can_train
    finally:
        tensor.requires_grad_(trained)
