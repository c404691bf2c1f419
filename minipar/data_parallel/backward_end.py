"""A callback at the end of a backward, to reduce the remaining gradients; and hooks that do not keep a wrapper alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from minipar.data_parallel.arguments import refuse_copy


class WeakCall:
    """A function that calls a method, with `args` first; once the method's object is freed, it does nothing.

    The wrappers' hooks are WeakCalls. A bound method as a hook would keep the wrapper alive until the garbage collector
    runs or, on a parameter, until the process ends, because the collector does not see the hooks of parameters.
    """

    def __init__(self, method: Callable[..., None], *args: Any):
        self._method, self._args = weakref.WeakMethod(method), args

    def __call__(self, *args: Any) -> None:
        if (method := self._method()) is not None:
            method(*self._args, *args)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        owner = getattr(self._method(), "__self__", self)
        refuse_copy(type(owner).__name__, "make another of an unwrapped copy of the model")


class BackwardEnd:
    """Calls the method `finish` once, at the end of the backward in which `arm` is called.

    If an exception ends the backward, it calls the method `failed`, if given, before the exception reaches the caller. It
    stays armed until `disarm`. It keeps the methods' object alive only from `arm` until that call.
    """

    def __init__(self, finish: Callable[[], None], failed: Callable[[], None] | None = None):
        self.armed = False
        self._num_armed = 0
        self._finish = weakref.WeakMethod(finish)
        self._failed = failed and WeakCall(failed)

    def arm(self) -> None:
        if self.armed:
            return
        self.armed = True
        self._num_armed += 1
        end = partial(self._end, self._finish())
        Variable._execution_engine.queue_callback(end)
        if self._failed is not None:  # autograd tells nobody of an exception, but it drops its callbacks
            weakref.finalize(end, WeakCall(self._dropped), self._num_armed).atexit = False

    def _dropped(self, number: int) -> None:
        if self._failed is not None and self.armed and number == self._num_armed:
            self._failed()

    def disarm(self) -> None:
        self.armed = False

    def _end(self, finish: Callable[[], None] | None) -> None:
        if finish is not None:
            finish()
        self.armed = False


class Synchronised:
    """Whether backwards reduce gradients; and whether some may be `unreduced`, the same on every rank."""

    synchronised = unreduced = True

    @contextmanager
    def reducing(self, synchronised: bool) -> Iterator[None]:
        before, self.synchronised = self.synchronised, synchronised
        try:
            yield
        finally:
            self.synchronised, self.unreduced = before, True


class LastOf:
    """A hook for several tensors, which makes one call when a backward has computed the gradients of all of them.

    torch's `register_multi_grad_hook(mode="all")` does the same, but its hooks refer to the autograd nodes that hold them,
    a cycle that is never freed.
    """

    def __init__(self, number: int, call: Callable[[], None]):
        self._number, self._call = number, call
        self._backward, self._missing = -1, 0

    def __call__(self, gradient: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._missing = backward, self._number
        self._missing -= 1
        if self._missing == 0:
            self._call()


def in_backward() -> bool:
    """Return whether the calling thread is inside a backward; a forward that runs there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def arm_on_backward(outputs: object, arm: Callable[[], None]) -> None:
    """Call `arm` when a backward reaches any output.

    So a rank takes part in the reduction even if none of its parameters gets a gradient.
    """
    for x in tensors_in(outputs):
        if x.requires_grad:
            x.register_hook(lambda _: arm())


def tensors_in(outputs: object, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in a module's outputs, including those in containers and in attributes of objects."""
    for x in tree_leaves(outputs):
        if isinstance(x, Tensor):
            yield x
        elif depth and not isinstance(x, type | nn.Module | Callable):
            yield from tensors_in(_attributes(x), depth - 1)


def _attributes(x: object) -> list[object]:
    if is_dataclass(x):
        return [getattr(x, field.name, None) for field in fields(x)]
    return list(getattr(x, "__dict__", {}).values())
