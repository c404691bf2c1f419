"""A cache of the shapes that operations return on tensors without values, since torch takes long to compute them.

The first time that an operation gets inputs of certain shapes, it is run, and raises the errors of a real run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
META = torch.device("meta")


class KnownShapes:
    """The effects of operations, by the shapes of their inputs. All ranks share one cache.

    _made    operation and shapes -> size, stride and dtype of each result, if the results share no memory with the
             inputs; and whether the operation returns one tensor, in place of a tuple
    _writes  operations and shapes that only write to a tensor: without values, they need not be run again
    """

    def __init__(self) -> None:
        self._made: dict[object, tuple[list[tuple[Any, ...]], bool]] = {}
        self._writes: set[object] = set()

    def run(self, function: Any, on_meta: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the results of an operation, without values. If its effect is not known, run `on_meta` and remember it.

        on_meta  the operation, on inputs that may be on the CPU
        """
        makes, written = _effect(function)
        x = arguments(function, args, kwargs)[written] if written else None
        if not makes and (x is None or not x.is_meta):
            return on_meta(*args, **kwargs)
        key = function, _key(args), _key(kwargs)
        if key in self._writes:
            return x
        if key in self._made:
            shapes, single = self._made[key]
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device=META) for size, stride, dtype in shapes
            ]
            return made[0] if single else tuple(made)
        before = x is not None and _place(x)
        result = on_meta(*args, **kwargs)
        if x is None:
            made = [result] if isinstance(result, Tensor) else result
            if isinstance(made, list | tuple) and all(type(x) is Tensor for x in made):
                self._made[key] = [(x.shape, x.stride(), x.dtype) for x in made], made is not result
        elif result is x and _place(x) == before:  # it neither resized nor moved x
            self._writes.add(key)
        return result


def arguments(function: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operation's arguments by name."""
    return {argument.name: value for argument, value in zip(function._schema.arguments, args)} | kwargs


@cache
def written_arguments(function: Any) -> list[str]:
    """Return the names of the arguments that an operation writes to."""
    return [x.name for x in function._schema.arguments if x.alias_info is not None and x.alias_info.is_write]


@cache
def _effect(function: Any) -> tuple[bool, str]:
    """Return whether an operation only makes new tensors; else the argument that it writes to and returns, if it is one."""
    schema, written = function._schema, written_arguments(function)
    makes = all(value.alias_info is None for value in (*schema.arguments, *schema.returns))
    # These change more than shapes describe: whose storage a tensor has, or how large it is.
    moves = function.overloadpacket in (aten.set_, aten.resize_)
    return makes, written[0] if len(written) == len(schema.returns) == 1 and not moves else ""


def _place(x: Tensor) -> tuple[object, ...]:
    storage = x.untyped_storage()
    return x.shape, x.stride(), storage._cdata, storage.nbytes()


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_key(x) for x in value])
    if isinstance(value, dict):
        return tuple([(name, _key(x)) for name, x in value.items()])
    # With the type, because 1, 1.0 and True are equal but promote dtypes differently.
    return type(value), value
