"""The gradient reduction of DDP and ZeRO, bucket by bucket while the backward is still running.

    a gradient is computed   it is copied into its bucket; reductions of full buckets are launched, in a fixed order
    the backward ends        the remaining reductions are launched, and all of them are waited for

The order is fixed because gradients may become ready in different orders on different ranks, and collectives called in
different orders hang or mix up buckets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minipar.data_parallel.backward_end import BackwardEnd, Synchronised, WeakCall, in_backward
from minipar.data_parallel.buckets import B
from minipar.data_parallel.partial_gradients import ReducedGradient
from minipar.mesh import placement_of
from minipar.model.overrides import BeforeAdding


class ReducerHook(WeakCall):
    """A parameter's hook, which calls its reducer's `on_gradient`, unless the reducer was freed."""

    def __init__(self, reducer: GradientReducer[Any]):
        super().__init__(reducer.on_gradient)
        self.reducer = weakref.ref(reducer)


class GradientReducer(Synchronised, Generic[B]):
    """Reduce buckets in order during the backward.

    buckets    in the order in which to reduce them, the same on every rank
    finish     (): write the gradients; all reductions have ended
    owner      "DDP" or "ZeroOptimizer"
    failed     (): an exception has ended a backward; see `BackwardEnd`
    at_once    the number of reductions under way at a time, if there is a limit
    used       the parameters in the buckets launched so far that have a gradient on this rank
    under_way  the launched buckets, each with a function that waits for its reduction

    A parameter has one reducer. A later DDP or ZeroOptimizer takes the parameter over; using the earlier one then raises.
    """

    def __init__(
        self,
        owner: str,
        finish: Callable[[], None],
        failed: Callable[[], None] | None = None,
        at_once: int | None = None,
    ):
        self.owner, self.finish, self.at_once = owner, WeakCall(finish), at_once
        self.buckets: list[B] = []
        self.bucket_of: dict[nn.Parameter, B] = {}
        self.used: set[nn.Parameter] = set()
        self.under_way: list[tuple[B, Callable[[], None]]] = []
        self.end = BackwardEnd(self._end_of_backward, failed)
        self._hooks: list[RemovableHandle] = []
        self._replaced_by: str | None = None
        self.begin()

    def add(self, buckets: Sequence[B]) -> None:
        """Reduce these buckets too, after the existing ones."""
        if not buckets:
            return
        self.buckets += buckets
        for bucket in buckets:
            take_over(bucket.params, self.owner)
            for param in bucket.params:
                self.bucket_of[param] = bucket
                self._hooks.append(param.register_post_accumulate_grad_hook(ReducerHook(self)))
                if bucket.sum_dtype != param.dtype:
                    param.grad_dtype = None  # any
                    widen = WeakCall(self.before_adding, weakref.ref(param))
                    self._hooks.append(param.register_hook(BeforeAdding(widen)))
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

    def reset_after_error(self) -> bool:
        """If an exception ended the last backward, wait for its reductions, and begin. Return whether one did."""
        interrupted = self.end.armed and not in_backward()
        if interrupted:
            self._wait()
            self.begin()
        return interrupted

    def _wait(self) -> None:
        under_way, self.under_way = self.under_way, []
        for _, wait in under_way:
            wait()

    def before_adding(self, param: weakref.ref[nn.Parameter], gradient: Tensor) -> None:
        if (found := param()) is not None:
            self.bucket_of[found].widen(found)

    def on_gradient(self, param: nn.Parameter) -> None:
        """Collect the complete `param.grad`, and launch full buckets. Raises RuntimeError if its bucket was launched."""
        bucket = self.bucket_of[param]
        if self.synchronised and param not in self._missing[bucket]:
            raise RuntimeError(
                f"the gradient of {placement_of(param).name} changed after its bucket was reduced: "
                "it was used in a nested backward (reentrant checkpointing?), or an exception ended the backward before; "
                "DDP's next forward and ZeroOptimizer's zero_grad() begin anew"
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
            if bucket.collect(param):  # a gradient from a backward under no_sync
                self.used.add(param)
            else:
                self.used.discard(param)
        self._launched += 1
        if len(self.under_way) == self.at_once:
            self.under_way.pop(0)[1]()
        self.under_way.append((bucket, bucket.reduce(self.used)))

    def _end_of_backward(self) -> None:
        while self._launched < len(self.buckets):
            self._launch_next()
        self._wait()
        self.finish()
        self.begin()
        self.unreduced = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards only accumulate. A backward outside it, or `synchronize`, reduces the sum."""
        self.check()
        return self.reducing(False)

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now. Call it if the last backward ran inside `no_sync()`."""
        self.check()
        self.begin()
        self._end_of_backward()


def take_over(params: Iterable[nn.Parameter], by: str) -> None:
    """Retire the reducers that an earlier DDP or ZeroOptimizer has attached to these parameters."""
    for param in params:
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, ReducerHook) and (reducer := hook.reducer()) is not None:
                reducer.retire(by)
