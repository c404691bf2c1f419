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
        if not makes and written is None:
            return on_meta(*args, **kwargs)
        try:
            key = (function, _key(args), _key(tuple(kwargs.items())) if kwargs else None)
            known = self._made.get(key)
        except TypeError:
            return on_meta(*args, **kwargs)
        if known is not None:
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device=META)
                for size, stride, dtype in known[0]
            ]
            return made[0] if known[1] else tuple(made)
        if makes:
            return self._make(key, on_meta, args, kwargs)
        assert written is not None
        position, name = written
        x = args[position] if position < len(args) else kwargs[name]
        if not x.is_meta:
            return on_meta(*args, **kwargs)
        return self._write((key, x.untyped_storage().nbytes()), x, on_meta, args, kwargs)

    def _make(self, key: object, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        made = [result] if isinstance(result, Tensor) else result
        if isinstance(made, list | tuple) and all(type(x) is Tensor for x in made):
            self._made[key] = [(x.shape, x.stride(), x.dtype) for x in made], made is not result
        return result

    def _write(self, key: object, x: Tensor, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if key in self._writes:
            return x
        before = _place(x)
        result = function(*args, **kwargs)
        if result is x and _place(x) == before:  # it neither resized nor moved x
            self._writes.add(key)
        return result


@cache
def _effect(function: Any) -> tuple[bool, tuple[int, str] | None]:
    """Return (makes, written), from an operation's schema.

    makes    whether it only makes new tensors
    written  else the position and name of the argument that it writes to and returns, if there is exactly one
    """
    schema = function._schema
    if all(value.alias_info is None for value in (*schema.arguments, *schema.returns)):
        return True, None
    written = [(i, x.name) for i, x in enumerate(schema.arguments) if _is_written(x)]
    returned = [x for x in schema.returns if _is_written(x)]
    # `set_` takes over another tensor's storage, which shapes do not describe.
    sets = function.overloadpacket is aten.set_
    return False, written[0] if len(written) == len(returned) == len(
        schema.returns
    ) == 1 and not sets else None


def _is_written(value: Any) -> bool:
    return value.alias_info is not None and value.alias_info.is_write


def _place(x: Tensor) -> tuple[object, ...]:
    storage = x.untyped_storage()
    return x.shape, x.stride(), storage._cdata, storage.nbytes()


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_key(x) for x in value])
    # With the type, because 1, 1.0 and True are equal but promote dtypes differently.
    return type(value), value
