"""Tensors of a dry run: floating-point tensors are on the meta device, with a shape but without values.

Integers made on the host (tokens, positions, shapes, lengths) keep their values, so that the program takes the same
branches as in a run. A result computed from both kinds of tensors has no values. A program that reads a tensor without
values gets the value that `assumed.py` lists, or is refused.

Every storage counts towards `DryTensors.now` and `peak`, as if it were in the rank's memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from minipar.extras.dry_run.assumed import ASSUMED
from minipar.extras.dry_run.record import Refused
from minipar.extras.dry_run.shapes import META, KnownShapes
from minipar.support.live_bytes import LiveBytes

aten = torch.ops.aten
# Factory operations. Their results go to the meta device if they are floating point; integers keep their values.
MAKES = {aten.empty, aten.zeros, aten.ones, aten.full, aten.rand, aten.randn}
DEVICE_OF = torch.Tensor.device.__get__
# Modules that check or dispatch on `tensor.device`: there, a meta tensor says that it is on the CPU, as in a run.
ASKS_FOR_DEVICE = ("minipar.transport.errors", "minipar.model.fused")
READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy")


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts. (Torch's `tree_leaves` would take most of a dry run's time.)"""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for x in value:
            yield from _tensors_in(x)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


@cache
def _is_view(function: Any) -> bool:
    """Return whether an operation's results share the memory of its inputs, and no memory is written."""
    aliases = [value.alias_info for value in function._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


class DryTensors(LiveBytes):
    """The mode in which a rank's program runs: puts floats on the meta device, and counts the bytes of storages.

    assumed  the assumptions that were used, in words
    """

    def __init__(self, shapes: KnownShapes) -> None:
        super().__init__()
        self.assumed: set[str] = set()
        self._shapes = shapes
        self._sizes: dict[int, int] = {}  # bytes of each storage that is alive
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
        tensors = list(_tensors_in((args, kwargs)))
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
        # `torch.tensor` allocates its storage before any mode sees it, and then calls `lift_fresh`. So this input is new.
        self._count(result, [] if function is aten.lift_fresh.default else tensors)
        return result

    def _make(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if getattr(function, "overloadpacket", None) not in MAKES:
            return function(*args, **kwargs)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if function.overloadpacket is aten.full and kwargs.get("dtype") is None:
            dtype = torch.tensor(args[1]).dtype
        if not dtype.is_floating_point:
            return function(*args, **{**kwargs, "device": torch.device("cpu")})
        return torch.empty(args[0], dtype=dtype, device=META)

    def _compute(self, function: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Compute only the shapes of an operation's results, since at least one of its inputs has no values."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        if all(x.is_meta for x in tensors):
            return self._shapes.run(function, args, kwargs)
        if not any(x.is_meta for x in tensors) and _is_view(function):
            # The view stays on the CPU: it shares a storage whose contents are already marked as unknown.
            return function(*args, **kwargs)
        standing_in: dict[int, Tensor] = {}  # id of a meta copy -> the CPU tensor that it replaces

        def on_meta(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.is_meta:
                return x
            copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
            standing_in[id(copy)] = x
            return copy

        new_args, new_kwargs = tree_map(on_meta, (args, kwargs))
        result = function(*new_args, **new_kwargs)
        for argument, given in zip(function._schema.arguments, new_args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._forget_all(given, standing_in)
        for name, given in new_kwargs.items():
            if name == "out" or name.startswith("out"):
                self._forget_all(given, standing_in)
        return tree_map(lambda x: standing_in.get(id(x), x), result)

    def _forget_all(self, written: Any, standing_in: dict[int, Tensor]) -> None:
        for x in _tensors_in(written):
            if id(x) in standing_in:
                self.forget_contents(standing_in[id(x)])

    def _count(self, result: Any, inputs: list[Tensor]) -> None:
        before = {x.untyped_storage()._cdata for x in inputs}
        for x in _tensors_in(result):
            if x.untyped_storage()._cdata not in before | self._alive:
                self._on_allocate(x.untyped_storage())

    def _on_allocate(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._alive.add(key)
        self._sizes[key] = 0
        self.resized(key, storage.nbytes())
        weakref.finalize(storage, self._on_free, key, 0)

    def _on_free(self, key: int, num_bytes: int) -> None:
        self._alive.discard(key)
        self.now -= self._sizes.pop(key)

    def resized(self, key: int, num_bytes: int) -> None:
        """Update the count of a storage that now has `num_bytes` bytes."""
        if key in self._sizes:
            self.now += num_bytes - self._sizes[key]
            self._sizes[key] = num_bytes
            self.peak = max(self.peak, self.now)


class DryReads(TorchFunctionMode):
    """The mode that returns the assumed value when a tensor without values is read. Raises Refused if none is assumed."""

    def __init__(self, tensors: DryTensors):
        super().__init__()
        self._tensors = tensors

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in READS and not self._tensors.has_contents(args[0]):
            return self._assume(args[0], sys._getframe(1))
        if (
            name == "__get__"
            and function == DEVICE_OF
            and sys._getframe(1).f_globals["__name__"] in ASKS_FOR_DEVICE
        ):
            return torch.device("cpu")  # where the tensor would be in a run
        if function is F.scaled_dot_product_attention and args[0].is_meta and kwargs.get("attn_mask") is None:
            # On the meta device torch would choose the implementation that stores all scores; in a run it uses a kernel.
            return aten._scaled_dot_product_flash_attention_for_cpu(*args, 0.0, kwargs["is_causal"])[0]
        if name == "pin_memory":
            return args[0]
        # Torch returns 0 for every meta tensor, but callers compare pointers.
        if name == "data_ptr" and args[0].is_meta:
            return args[0].untyped_storage()._cdata + args[0].storage_offset() * args[0].itemsize
        return function(*args, **kwargs)

    def _assume(self, x: Tensor, frame: FrameType | None) -> Any:
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("minipar."):
            frame = frame.f_back
        assert frame is not None
        module, function = frame.f_globals["__name__"], frame.f_code.co_name
        for assumption in ASSUMED:
            if assumption.module == module and assumption.function == function:
                self._tensors.assumed.add(assumption.words)
                return assumption.value(x, frame)
        raise Refused(
            f"{module}.{function} (line {frame.f_lineno}) decides by numbers that only a real run has, and a dry run "
            "assumes nothing about them; leave out the option that needs it"
        )


@contextmanager
def tensors_without_contents(shared: AllRanks) -> Iterator[DryTensors]:
    """Return a context in which this thread runs a rank's program on tensors without values."""
    tensors = DryTensors(shared.shapes)
    shared.watchers.append(tensors)
    with tensors, DryReads(tensors):
        yield tensors


class AllRanks:
    """State shared by the modes of all ranks. As a context, it tells them of each `storage.resize_`, which no mode sees."""

    def __init__(self) -> None:
        self.watchers: list[DryTensors] = []
        self.shapes = KnownShapes()

    def __enter__(self) -> AllRanks:
        resize = torch.UntypedStorage.resize_
        watchers = self.watchers

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            for watcher in watchers:
                watcher.resized(storage._cdata, storage.nbytes())
            return resized

        self._resize = resize
        torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
