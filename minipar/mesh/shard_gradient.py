"""`ShardGradient`: a `.grad` of which other ranks have the rest. It is a tensor like any other, but it has no norm.

Without it, torch.nn.utils.clip_grad_norm_ would silently clip by the norm of this rank's part, which differs between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

INSTEAD = (
    "use minipar.clip_grad_norm_(shards, max_norm, comm) to clip (the shards are ZeroOptimizer.shards, else the model's "
    "parameters; comm is all ranks that hold parts of the model), "
    "and minipar.data_parallel.DynamicLossScaler in place of torch's GradScaler"
)


class ShardGradient(Tensor):
    """A gradient of which this rank has a part: computing its norm raises."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in NORMS:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} was called on gradients of which this rank has a part; {INSTEAD}; "
                "gradient.as_subclass(torch.Tensor) has the norm of what this rank has of it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


NORMS = {
    torch.norm,
    Tensor.norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    torch._foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_,
}


def as_shard_gradient(gradient: Tensor, is_part: bool = True) -> Tensor:
    """Return the gradient as a `ShardGradient`, or unchanged unless it `is_part` of one."""
    return gradient.as_subclass(ShardGradient) if is_part else gradient


def mark_gradient(tensor: Tensor) -> None:
    """Make a `.grad` a `ShardGradient`: the hook of parameters of which other ranks hold the rest."""
    if type(tensor.grad) is Tensor:
        tensor.grad = as_shard_gradient(tensor.grad)


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
