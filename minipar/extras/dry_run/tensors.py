"""Tensors of a dry run: those of floating-point numbers are on the meta device, with a shape but without contents.

Whole numbers made on the host (tokens, positions, shapes, lengths) keep their values, so that the program goes the way that
it goes in a run. What is computed from both has no contents. A program that reads a number without contents gets the one
that `assumed.py` lists, or is refused.

Inside, every storage counts towards `DryTensors.now` and `peak`, as if it were in the rank's memory.
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
# Operations that make a tensor from no other tensor, and whose contents nobody needs if they are floats.
MAKES = {aten.empty, aten.zeros, aten.ones, aten.full, aten.rand, aten.randn}
DEVICE_OF = torch.Tensor.device.__get__
# A tensor to be sent must be on its Comm's device, and torch's kernels are chosen by the device.
ASKS_FOR_DEVICE = ("minipar.transport.errors", "minipar.model.fused")
READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy")


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts; torch's own function takes most of a dry run's time."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for x in value:
            yield from _tensors_in(x)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


@cache
def _is_view(function: Any) -> bool:
    """Return whether an operation's results share their inputs' memory, and none is written."""
    aliases = [value.alias_info for value in function._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


class DryTensors(LiveBytes):
    """The mode in which a rank's program runs: makes floats on the meta device, and counts the bytes of storages.

    assumed  the words of the assumptions that were used
    """

    def __init__(self, shapes: KnownShapes) -> None:
        super().__init__()
        self.assumed: set[str] = set()
        self._shapes = shapes
        self._sizes: dict[int, int] = {}  # bytes of each storage that is alive
        self._unknown: set[int] = (
            set()
        )  # storages on the CPU whose contents depend on numbers that do not exist

    def has_contents(self, x: Tensor) -> bool:
        return not x.is_meta and x.untyped_storage()._cdata not in self._unknown

    def forget_contents(self, x: Tensor) -> None:
        """Treat the contents of x, on the CPU, as not known."""
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
        # `torch.tensor` makes its storage before any mode sees it, and lifts it.
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
        """Run an operation of which an input has no contents: only the shapes of its results are computed."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        if all(x.is_meta for x in tensors):
            return self._shapes.run(function, args, kwargs)
        if not any(x.is_meta for x in tensors) and _is_view(function):
            return function(*args, **kwargs)  # one storage, counted once; its contents are as little known
        standing_in: dict[int, Tensor] = {}  # id of a copy on the meta device -> the tensor on the CPU

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
        """Count a storage that now has this many bytes."""
        if key in self._sizes:
            self.now += num_bytes - self._sizes[key]
            self._sizes[key] = num_bytes
            self.peak = max(self.peak, self.now)


class DryReads(TorchFunctionMode):
    """The mode in which reading a number without contents returns what is assumed. Raises Refused where nothing is."""

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
            # On the meta device torch takes the attention that keeps all scores; in a run it takes a kernel.
            return aten._scaled_dot_product_flash_attention_for_cpu(*args, 0.0, kwargs["is_causal"])[0]
        if name == "pin_memory":
            return args[0]
        if name == "data_ptr" and args[0].is_meta:  # which is 0 for all of them, and is compared
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
    """Run a rank's program in this thread on tensors without contents."""
    tensors = DryTensors(shared.shapes)
    shared.watchers.append(tensors)
    with tensors, DryReads(tensors):
        yield tensors


class AllRanks:
    """What the modes of all ranks share. As a context it tells them of `storage.resize_`, which no mode sees."""

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
