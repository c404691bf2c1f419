"""`.grad` where this rank has only a part of a gradient: torch functions that would take it for the whole raise.

    ReducedGradient   the `.grad` of a parameter under ZeRO, once reduced: no memory and no values, these are in the shards
    ShardGradient     the `.grad` of a shard, under ZeRO or FSDP: a tensor like any other, but it has no norm

Without them, torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's part, or by 0, and say nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
INSTEAD = (
    "use minipar.clip_grad_norm_(shards, max_norm, comm) to clip (the shards are ZeroOptimizer.shards, or FSDP's "
    "parameters), and minipar.data_parallel.DynamicLossScaler in place of torch's GradScaler"
)


class ReducedGradient(Tensor):
    """Stands in `param.grad` for a gradient that is reduced, so that dropping or zeroing it drops or zeroes the shard's.

    added   what a backward has added to it since, not reduced yet, or None
    """

    @staticmethod
    def __new__(cls, param: nn.Parameter, name: str, shard: Tensor):
        like = dict(dtype=param.dtype, device=param.device, storage_size=0)
        return Tensor._make_wrapper_subclass(cls, param.shape, strides=param.stride(), **like)

    def __init__(self, param: nn.Parameter, name: str, shard: Tensor):
        self.of, self.shard = name, shard
        self.added: Tensor | None = None

    def __repr__(self) -> str:
        return f"ReducedGradient({self.of})"

    def _add(self, gradient: Tensor, alpha=1) -> ReducedGradient:
        gradient = gradient.detach() * alpha
        self.added = gradient if self.added is None else self.added.add_(gradient)
        return self

    def _zero(self) -> ReducedGradient:
        self.added = None
        if self.shard.grad is not None:
            self.shard.grad.zero_()
        return self

    def _zero_each(self) -> None:
        for x in self:
            x.zero_()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in ALLOWED:
            return ALLOWED[func](*args, **(kwargs or {}))
        name = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)).of
        raise RuntimeError(
            f"{func} was called on the gradient of {name}, which ZeroOptimizer has reduced: this rank has a part of it; "
            f"{INSTEAD}"
        )


ALLOWED = {  # by autograd, which adds to a gradient, and by zero_grad
    aten.add_.Tensor: ReducedGradient._add,
    aten.add.Tensor: ReducedGradient._add,
    aten.zero_.default: ReducedGradient._zero,
    aten._foreach_zero_.default: ReducedGradient._zero_each,
    aten.detach.default: lambda gradient: gradient,
}


class ShardGradient(Tensor):
    """A gradient of a shard."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in NORMS:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} was called on gradients of which this rank has a part; {INSTEAD}"
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


def as_shard_gradient(gradient: Tensor, num_ranks: int) -> Tensor:
    """Return the gradient as one that has no norm, unless this rank has the whole."""
    return gradient if num_ranks == 1 else gradient.as_subclass(ShardGradient)
