"""The machine under DDP and ZeRO: gradients are reduced bucket by bucket while the backward is still running.

    a gradient is computed   it goes into its bucket; buckets that are full are launched, in their one order
    the backward ends        the buckets that are left are launched, and all of them are waited for

Launching in one order is what keeps ranks together: gradients may become ready in another order on another rank, and
collectives that are called in different orders hang, or mix their buckets up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from minipar.mesh import placement_of


class BackwardEnd:
    """Calls `finish` once at the end of the backward in which it was armed."""

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


class GradientReducer:
    """Buckets, their order, launch, finish and no_sync; DDP and ZeRO say what a launch and a finish are.

    buckets  in the order in which to reduce them, the same on every rank; each has `params` and `collect(param)`
    launch   (bucket) -> starts its reduction; every gradient of it has been collected
    finish   () -> waits for what was launched, and hands out the gradients
    """

    def __init__(self, buckets: Sequence, launch: Callable, finish: Callable[[], None]):
        self.buckets, self.launch, self.finish = buckets, launch, finish
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket.params}
        self.used: set[nn.Parameter] = (
            set()
        )  # parameters with a gradient on this rank, until the caller clears it
        self.synchronised = True
        self.end = BackwardEnd(self._end_of_backward)
        self.begin()
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(self.on_gradient)

    def begin(self) -> None:
        """Nothing has been launched."""
        self.end.disarm()
        self._launched = 0
        self._missing = {bucket: set(bucket.params) for bucket in self.buckets}

    def recover(self) -> None:
        """Before a forward: forget a backward that an exception ended."""
        if self.end.armed and not in_backward():
            self.begin()

    def on_gradient(self, param: nn.Parameter) -> None:
        """`param.grad` is complete, as far as this backward goes. Raises RuntimeError where its bucket has left already."""
        bucket = self.bucket_of[param]
        if self.synchronised and param not in self._missing[bucket]:
            raise RuntimeError(
                f"the gradient of {placement_of(param).name} changed after its bucket was reduced: "
                "it was used in a nested backward (reentrant checkpointing?)"
            )
        self.used.add(param)
        bucket.collect(param)
        if not self.synchronised:
            return
        self.end.arm()
        self._missing[bucket].discard(param)
        while self._launched < len(self.buckets) and not self._missing[self.buckets[self._launched]]:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.buckets[self._launched]
        for param in self._missing[bucket]:
            if param.grad is not None:  # left by a backward under no_sync
                self.used.add(param)
            bucket.collect(param)
        self._launched += 1
        self.launch(bucket)

    def _end_of_backward(self) -> None:
        while self._launched < len(self.buckets):
            self._launch_next()
        self.finish()
        self.begin()

    @contextmanager
    def no_sync(self):
        """Backwards inside only accumulate; the next one outside, or `synchronize`, reduces the sum."""
        before, self.synchronised = self.synchronised, False
        try:
            yield
        finally:
            self.synchronised = before

    def synchronize(self) -> None:
        """Reduce what has been accumulated, now: for gradients that no backward outside no_sync has computed."""
        self.begin()
        self._end_of_backward()


def arm_on_backward(output: Tensor, end: BackwardEnd) -> Tensor:
    """The output, whose backward arms `end`: so a rank on which no parameter gets a gradient still takes part."""
    return _ArmOnBackward.apply(output, end)


class _ArmOnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, end):
        ctx.end = end
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.end.arm()
        return grad, None
