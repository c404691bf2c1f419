"""The gradient reduction of DDP and ZeRO, bucket by bucket while the backward is still running.

    a gradient is computed   it is copied into its bucket; full buckets are launched, in an order fixed in advance
    the backward ends        the remaining buckets are launched, and all of them are waited for

All ranks must launch in the same order. Gradients may become ready in different orders on different ranks, and
collectives that ranks call in different orders hang, or mix up buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import Variable

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


class GradientReducer:
    """Reduce buckets in order during the backward; DDP and ZeRO supply `launch` and `finish`.

    buckets  in the order in which to reduce them, the same on every rank; each has `params` and `collect(param)`
    launch   (bucket): start its reduction; all its gradients have been collected
    finish   (): wait for all launched reductions, and write the gradients
    """

    def __init__(self, buckets: Sequence, launch: Callable, finish: Callable[[], None]):
        self.buckets, self.launch, self.finish = buckets, launch, finish
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket.params}
        # Parameters with a gradient on this rank, until the caller clears the set.
        self.used: set[nn.Parameter] = set()
        self.synchronised = True
        self.end = BackwardEnd(self._end_of_backward)
        self.begin()
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(self.on_gradient)

    def begin(self) -> None:
        """Reset to the start of a backward: no bucket is launched, and all gradients are missing."""
        self.end.disarm()
        self._launched = 0
        self._missing = {bucket: set(bucket.params) for bucket in self.buckets}

    def reset_after_error(self) -> None:
        """Before a forward, reset if an exception ended the last backward."""
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
            if param.grad is not None:  # from a backward under no_sync
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
        """A context whose backwards only accumulate; the next one outside, or `synchronize`, reduces the sum."""
        before, self.synchronised = self.synchronised, False
        try:
            yield
        finally:
            self.synchronised = before

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now, for when no backward outside `no_sync()` follows to do so."""
        self.begin()
        self._end_of_backward()


def arm_on_backward(output: Tensor, end: BackwardEnd) -> Tensor:
    """Return the output; its backward arms `end`, so that a rank takes part even if no parameter there gets a gradient."""
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
