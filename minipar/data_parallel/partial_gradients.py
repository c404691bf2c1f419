"""`ReducedGradient`: the `.grad` of a parameter under ZeRO, once reduced. It has no memory; the values are in the shards.

Without it, torch.nn.utils.clip_grad_norm_ would silently clip by a norm of 0: see `mesh/shard_gradient.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minipar.mesh import placement_of
from minipar.mesh.shard_gradient import INSTEAD

aten = torch.ops.aten


class ReducedGradient(Tensor):
    """A stand-in in `param.grad` for a reduced gradient. Dropping or zeroing it drops or zeroes the shard's gradient.

    added   the sum of the gradients that later backwards computed and that are not reduced yet, or None; in `sum_dtype`
            if they are several
    """

    @staticmethod
    def __new__(cls, param: nn.Parameter, shard: Tensor, sum_dtype: torch.dtype) -> ReducedGradient:
        return Tensor._make_wrapper_subclass(
            cls, param.shape, param.stride(), dtype=param.dtype, device=param.device, storage_size=0
        )

    def __init__(self, param: nn.Parameter, shard: Tensor, sum_dtype: torch.dtype):
        self.of, self.shard, self.sum_dtype = placement_of(param).name, shard, sum_dtype
        self.added: Tensor | None = None

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes private arguments
        return f"ReducedGradient({self.of})"

    def _add(self, gradient: Tensor, alpha: float = 1) -> ReducedGradient:
        gradient = gradient.detach() * alpha
        self.added = gradient if self.added is None else self.added.to(self.sum_dtype).add_(gradient)
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
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in ALLOWED:
            return ALLOWED[func](*args, **(kwargs or {}))
        name = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)).of
        raise RuntimeError(
            f"{func} was called on the gradient of {name}, which ZeroOptimizer has reduced: this rank has a part of it; "
            f"{INSTEAD}"
        )


ALLOWED: dict[Any, Callable[..., Any]] = {  # autograd adds, and zero_grad zeroes
    aten.add_.Tensor: ReducedGradient._add,
    aten.add.Tensor: ReducedGradient._add,
    aten.zero_.default: ReducedGradient._zero,
    aten._foreach_zero_.default: ReducedGradient._zero_each,
    aten.detach.default: lambda gradient: gradient,
}
