"""A cache of the shapes that operations return on tensors without values, since torch takes long to compute them.

The first time that an operation gets inputs of certain shapes, it is run, and raises the errors of a real run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

META = torch.device("meta")


class KnownShapes:
    """The results of operations that only make new tensors, by the shapes of their inputs. All ranks share one cache.

    _made    operation and shapes -> size, stride and dtype of each result; and whether the operation returns one tensor, in
             place of a tuple
    """

    def __init__(self) -> None:
        self._made: dict[object, tuple[list[tuple[Any, ...]], bool]] = {}

    def run(self, function: Any, on_meta: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the results of an operation, without values. If they are not known, run `on_meta` and remember them.

        on_meta  the operation, on inputs that may be on the CPU
        """
        if not _makes_new(function):
            return on_meta(*args, **kwargs)
        try:
            key = (function, _key(args), _key(tuple(kwargs.items())))
            known = self._made.get(key)
        except TypeError:
            return on_meta(*args, **kwargs)
        if known is not None:
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device=META)
                for size, stride, dtype in known[0]
            ]
            return made[0] if known[1] else tuple(made)
        result = on_meta(*args, **kwargs)
        made = [result] if isinstance(result, Tensor) else result
        if isinstance(made, list | tuple) and all(type(x) is Tensor for x in made):
            self._made[key] = [(x.shape, x.stride(), x.dtype) for x in made], made is not result
        return result


@cache
def _makes_new(function: Any) -> bool:
    """Return whether an operation writes to none of its inputs, and its results share no memory with them."""
    schema = function._schema
    return all(value.alias_info is None for value in (*schema.arguments, *schema.returns))


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_key(x) for x in value])
    # With the type, because 1, 1.0 and True are equal but promote dtypes differently.
    return type(value), value
