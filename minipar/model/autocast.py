"""torch.autocast, for products that are autograd functions of our own: torch casts the inputs of its own products only."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def is_on(x: Tensor) -> bool:
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def cast(*inputs: Tensor | None) -> tuple[Any, ...]:
    """Return the inputs of a product, the first of which is a tensor, as torch.autocast casts them: not float64."""
    first = inputs[0]
    assert first is not None
    if not is_on(first):
        return inputs
    dtype = torch.get_autocast_dtype(first.device.type)
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(x.to(dtype) if x is not None and x.dtype in narrow else x for x in inputs)


def without_autocast(function: Callable[..., None]) -> Callable[..., None]:
    """Run a function, whose first argument is a tensor, in the dtypes that it chooses itself."""

    @wraps(function)
    def run(x: Tensor, *args: Any) -> None:
        if not is_on(x):
            return function(x, *args)
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args)

    return run
