"""Operations on tensors without contents, remembered by the shapes of their inputs: torch takes long to compute a result's.

The first operation on inputs of certain shapes is run, and raises what it would raise in a run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
META = torch.device("meta")


class KnownShapes:
    """What operations do, by the shapes of their inputs. All ranks share it.

    _made    operation and shapes -> size, stride and dtype of each result, which shares no memory with the inputs
    _writes  operations and shapes that only write to a tensor, which has no contents to be written
    """

    def __init__(self) -> None:
        self._made: dict[object, list[tuple[Any, ...]]] = {}
        self._writes: set[object] = set()

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        makes, written = _effect(function)
        if not makes and written is None:
            return function(*args, **kwargs)
        try:
            key = (function, _key(args), _key(tuple(kwargs.items())))
            hash(key)
        except TypeError:
            return function(*args, **kwargs)
        if makes:
            return self._make(key, function, args, kwargs)
        assert written is not None
        position, name = written
        x = args[position] if position < len(args) else kwargs[name]
        return self._write((key, x.untyped_storage().nbytes()), x, function, args, kwargs)

    def _make(self, key: object, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        known = self._made.get(key)
        if known is None:
            result = function(*args, **kwargs)
            made = [result] if isinstance(result, Tensor) else result
            if isinstance(made, list | tuple) and all(type(x) is Tensor for x in made):
                self._made[key] = [(x.shape, x.stride(), x.dtype) for x in made]
            return result
        made = [torch.empty_strided(size, stride, dtype=dtype, device=META) for size, stride, dtype in known]
        return made[0] if _returns_one(function) else tuple(made)

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
    """Return whether an operation only makes tensors; else the one argument that it writes to and returns, if it does."""
    schema = function._schema
    if all(value.alias_info is None for value in (*schema.arguments, *schema.returns)):
        return True, None
    written = [(i, x.name) for i, x in enumerate(schema.arguments) if _is_written(x)]
    returned = [x for x in schema.returns if _is_written(x)]
    sets = function.overloadpacket is aten.set_  # the memory of another tensor, which the shapes do not say
    return False, written[0] if len(written) == len(returned) == len(
        schema.returns
    ) == 1 and not sets else None


def _is_written(value: Any) -> bool:
    return value.alias_info is not None and value.alias_info.is_write


def _returns_one(function: Any) -> bool:
    returns = function._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def _place(x: Tensor) -> tuple[object, ...]:
    storage = x.untyped_storage()
    return x.shape, x.stride(), storage._cdata, storage.nbytes()


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_key(x) for x in value)
    return type(value), value  # 1, 1.0 and True are equal, and promote a dtype differently
