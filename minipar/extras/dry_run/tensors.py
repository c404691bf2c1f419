"""Tensors of a dry run: floating-point tensors are on the meta device, with a shape but without values.

Integers made on the host (tokens, positions, shapes, lengths) keep their values, so that the program takes the same
branches as in a run. A result computed from both kinds of tensors has no values. A program that reads a tensor without
values gets the value that `assumed.py` lists, or is refused (`reads.py`).

Every storage counts towards `DryTensors.now` and `peak`, as if it were in the rank's memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from minipar.extras.dry_run.record import Refused
from minipar.extras.dry_run.shapes import META, KnownShapes
from minipar.support.live_bytes import LiveBytes

aten = torch.ops.aten
# Factory operations. Their results go to the meta device if they are floating point; integers keep their values.
MAKES = {aten.empty, aten.zeros, aten.ones, aten.full, aten.rand, aten.randn, aten.arange}


def _tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts. (Torch's `tree_leaves` would take most of a dry run's time.)"""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors_in(*value)
        elif isinstance(value, dict):
            found += _tensors_in(*value.values())
    return found


@cache
def _is_view(function: Any) -> bool:
    """Return whether an operation's results share the memory of its inputs, and no memory is written."""
    aliases = [value.alias_info for value in function._schema.returns]
    # `torch.tensor` allocates a storage before any mode sees it, and then calls `lift_fresh`: its result is new.
    return (
        bool(aliases)
        and function is not aten.lift_fresh.default
        and all(alias is not None and not alias.is_write for alias in aliases)
    )


class DryTensors(LiveBytes):
    """The mode in which a rank's program runs: puts floats on the meta device, and counts the bytes of storages.

    assumed  the assumptions that were used, in words
    """

    def __init__(self, shapes: KnownShapes) -> None:
        super().__init__()
        self.assumed: set[str] = set()
        self._shapes = shapes
        self._sizes: dict[int, int] = {}  # storage that is alive -> its bytes
        # CPU storages whose contents are unknown, because they were computed from tensors without values.
        self._unknown: set[int] = set()

    def has_contents(self, x: Tensor) -> bool:
        return not x.is_meta and x.untyped_storage()._cdata not in self._unknown

    def forget_contents(self, x: Tensor) -> None:
        """Mark the contents of x, a CPU tensor, as unknown."""
        storage = x.untyped_storage()
        if storage._cdata not in self._unknown:
            self._unknown.add(storage._cdata)
            weakref.finalize(storage, self._unknown.discard, storage._cdata)

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(function):
            # It shares a storage that is counted already, and whose contents are known or not already.
            return function(*args, **kwargs)
        tensors = _tensors_in(args, kwargs)
        if not tensors:
            result = self._make(function, args, kwargs)
        elif all(self.has_contents(x) for x in tensors):
            if kwargs.get("device") == META:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            result = function(*args, **kwargs)
        else:
            try:
                result = self._compute(function, args, kwargs, tensors)
            except NotImplementedError as error:
                why = " ".join(str(error).split())[:200]
                raise Refused(
                    f"{function} gives a result whose shape or value depends on numbers, and a dry run has none: {why}"
                ) from error
        self._count(result, [] if function is aten.lift_fresh.default else tensors)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would otherwise wrap `__torch_dispatch__`, which takes a tenth of a dry run's time
        return False

    def _make(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if getattr(function, "overloadpacket", None) not in MAKES:
            return function(*args, **kwargs)
        generator = {"generator": None} if "generator" in kwargs else {}  # the caller's is of another device
        made = function(*args, **{**kwargs, **generator, "device": META})
        return (
            made if made.is_floating_point() else function(*args, **{**kwargs, "device": torch.device("cpu")})
        )

    def _compute(self, function: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Compute only the shapes of an operation's results, since at least one of its inputs has no values."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        if all(x.is_meta for x in tensors):
            return self._shapes.run(function, function, args, kwargs)
        standing_in: dict[int, Tensor] = {}  # id of a meta copy -> the CPU tensor that it replaces

        def on_meta(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.is_meta:
                return x
            copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
            standing_in[id(copy)] = x
            return copy

        def without_contents(*args: Any, **kwargs: Any) -> Any:
            new_args, new_kwargs = tree_map(on_meta, (args, kwargs))
            result = function(*new_args, **new_kwargs)
            arguments = function._schema.arguments
            given = dict(zip((argument.name for argument in arguments), new_args)) | new_kwargs
            for argument in arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for x in _tensors_in(given.get(argument.name)):
                        if id(x) in standing_in:
                            self.forget_contents(standing_in[id(x)])
            return tree_map(lambda x: standing_in.get(id(x), x), result)

        return self._shapes.run(function, without_contents, args, kwargs)

    def _count(self, result: Any, inputs: list[Tensor]) -> None:
        for x in _tensors_in(result):
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in self._sizes and all(key != y.untyped_storage()._cdata for y in inputs):
                self._on_allocate(storage)

    def _on_allocate(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._sizes[key] = 0
        self.resized(key, storage.nbytes())
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def resized(self, key: int, num_bytes: int) -> None:
        """Update the count of a storage that now has `num_bytes` bytes."""
        if key in self._sizes:
            self.now += num_bytes - self._sizes[key]
            self._sizes[key] = num_bytes
            self.peak = max(self.peak, self.now)
