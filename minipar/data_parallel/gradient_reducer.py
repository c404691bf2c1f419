"""The gradient reduction of DDP and ZeRO, bucket by bucket while the backward is still running.

    a gradient is computed   it is copied into its bucket; full buckets are launched, in an order fixed in advance
    the backward ends        the remaining buckets are launched, and all of them are waited for

All ranks must launch in the same order. Gradients may become ready in different orders on different ranks, and
collectives that ranks call in different orders hang, or mix up buckets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from minipar.data_parallel.partial_gradients import ReducedGradient
from minipar.mesh import placement_of


class BackwardEnd:
    """A callback to `finish`, made once at the end of the backward in which `arm` is called."""

    def __init__(self, finish: Callable[[], None]):
        self.armed = False
        self._finish = finish

    def arm(self) -> None:
        if not self.armed:
            self.armed = True
            Variable._execution_engine.queue_callback(self._end)

    def disarm(self) -> None:
        self.armed = False

    def _end(self) -> None:
        self._finish()
        self.armed = False


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class WeakHook:
    """A hook that calls a method as long as its object is in use elsewhere.

    Python's garbage collector does not see the hooks of a parameter. Were the method itself the hook, parameter and object
    would keep each other, and with them all gradients and streams, to the end of the process.
    """

    def __init__(self, method: Callable):
        self._method = weakref.WeakMethod(method)

    @property
    def owner(self):
        """The method's object; None where it is gone."""
        method = self._method()
        return None if method is None else method.__self__

    def __call__(self, *args) -> None:
        if (method := self._method()) is not None:
            method(*args)


class GradientReducer:
    """Reduce buckets in order during the backward; DDP and ZeRO supply `launch` and `finish`.

    buckets  in the order in which to reduce them, the same on every rank; each has `params` and `collect(param)`, which
             returns whether this rank has a gradient to reduce
    launch   (bucket): start its reduction; all its gradients have been collected
    finish   (): wait for all launched reductions, and write the gradients
    owner    "DDP" or "ZeroOptimizer"
    used     the parameters with a gradient on this rank, of the buckets launched so far

    A parameter has one reducer. A later DDP or ZeroOptimizer takes it over, and using the earlier one then raises.
    """

    def __init__(self, buckets: Sequence, launch: Callable, finish: Callable[[], None], owner: str):
        self.buckets, self.launch, self.finish, self.owner = [], launch, finish, owner
        self.bucket_of: dict[nn.Parameter, object] = {}
        self.used: set[nn.Parameter] = set()
        self.synchronised = True
        self.end = BackwardEnd(self._end_of_backward)
        self._hooks: list = []
        self._replaced_by: str | None = None
        self.begin()
        self.add(buckets)

    def add(self, buckets: Sequence) -> None:
        """Reduce these buckets too, after the others."""
        if not buckets:
            return
        self.buckets += buckets
        for bucket in buckets:
            take_over(bucket.params, self.owner)
            for param in bucket.params:
                self.bucket_of[param] = bucket
                self._hooks.append(param.register_post_accumulate_grad_hook(WeakHook(self.on_gradient)))
        self.begin()

    def retire(self, replaced_by: str) -> None:
        """Remove the hooks from all parameters. `check` raises from now on."""
        self._replaced_by = replaced_by
        for hook in self._hooks:
            hook.remove()
        for param in self.bucket_of:
            if isinstance(param.grad, ReducedGradient):
                param.grad = None

    def check(self) -> None:
        if self._replaced_by is not None:
            raise RuntimeError(
                f"this {self.owner} no longer reduces gradients: a later {self._replaced_by} was made for some of its "
                "parameters; use that one"
            )

    def begin(self) -> None:
        """Reset to the start of a backward: no bucket is launched, and all gradients are missing."""
        self.end.disarm()
        self._launched = 0
        self._missing = {bucket: set(bucket.params) for bucket in self.buckets}

    def reset_after_error(self) -> None:
        """Before a forward, reset if an exception ended the last backward."""
        self.check()
        if self.end.armed and not in_backward():
            self.begin()

    def on_gradient(self, param: nn.Parameter) -> None:
        """Collect the complete `param.grad`, and launch full buckets. Raises RuntimeError if its bucket was launched."""
        bucket = self.bucket_of[param]
        if self.synchronised and param not in self._missing[bucket]:
            raise RuntimeError(
                f"the gradient of {placement_of(param).name} changed after its bucket was reduced: "
                "it was used in a nested backward (reentrant checkpointing?)"
            )
        if bucket.collect(param):
            self.used.add(param)
        if not self.synchronised:
            return
        self.end.arm()
        self._missing[bucket].discard(param)
        while self._launched < len(self.buckets) and not self._missing[self.buckets[self._launched]]:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.buckets[self._launched]
        for param in self._missing[bucket]:
            if bucket.collect(param):  # from a backward under no_sync
                self.used.add(param)
            else:
                self.used.discard(param)
        self._launched += 1
        self.launch(bucket)

    def _end_of_backward(self) -> None:
        while self._launched < len(self.buckets):
            self._launch_next()
        self.finish()
        self.begin()

    @contextmanager
    def no_sync(self):
        """A context whose backwards only accumulate; the next one outside, or `synchronize`, reduces the sum."""
        before, self.synchronised = self.synchronised, False
        try:
            yield
        finally:
            self.synchronised = before

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now, for when no backward outside `no_sync()` follows to do so."""
        self.check()
        self.begin()
        self._end_of_backward()


def take_over(params: Iterable[nn.Parameter], by: str) -> None:
    """Retire the reducers that these parameters have: those of a DDP or ZeroOptimizer made for them before."""
    for param in params:
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, WeakHook) and isinstance(hook.owner, GradientReducer):
                hook.owner.retire(by)


def arm_on_backward(outputs, end: BackwardEnd) -> None:
    """Arm `end` in the backward of any output, so that a rank takes part even if no parameter there gets a gradient."""
    for x in tensors_in(outputs):
        if x.requires_grad:
            x.register_hook(lambda _: end.arm())


def tensors_in(outputs, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors of a module's outputs: in containers, and in the attributes of dataclasses and other objects."""
    for x in tree_leaves(outputs):
        if isinstance(x, Tensor):
            yield x
        elif depth and not isinstance(x, type | nn.Module | Callable):
            yield from tensors_in(_attributes(x), depth - 1)


def _attributes(x) -> list:
    if is_dataclass(x):
        return [getattr(x, field.name, None) for field in fields(x)]
    return list(getattr(x, "__dict__", {}).values())
