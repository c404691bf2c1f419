"""Dynamic loss scaling for fp16: without it, many gradients are below 6e-5, the smallest normal number of fp16."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.data_parallel.optimizer_interface import OptimizerInterface, as_optimizer_interface


class DynamicLossScaler:
    """A scale that multiplies the loss and divides the gradients, kept about as large as it can be without overflow.

    comm       all ranks that hold a part of any parameter, because each sees only its own gradients, and all must skip
               together. None: the caller tells `update` whether a step was taken
    current_scale  starts at `initial`
    interval   after `interval` steps in a row without overflow, the scale is multiplied by `growth`
    hysteresis after the scale has grown, the first `hysteresis` - 1 overflows leave it unchanged; each later one multiplies
               it by `backoff`

    backward   scaler.scale(loss).backward()
    step       grad = grad / scale, then the optimizer's step, if all gradients are finite on every rank; else no step

    Scaling by a power of two is exact for numbers that stay normal. Sends an all-reduce of 4 bytes per step.
    Source: Mixed Precision Training, arXiv:1710.03740, section 3.2.
    """

    def __init__(
        self,
        comm: Comm | None,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        hysteresis: int = 1,
    ):
        if not initial > 0 or not growth > 1 or not 0 < backoff < 1 or interval < 1 or hysteresis < 1:
            raise ValueError(
                f"initial={initial} must be above 0, growth={growth} above 1, backoff={backoff} between 0 and 1, "
                f"interval={interval} and hysteresis={hysteresis} at least 1"
            )
        self.current_scale, self._comm = float(initial), comm
        self._growth, self._backoff, self._interval = growth, backoff, interval
        self._hysteresis = hysteresis
        self._good_steps, self._overflows = 0, 0  # good steps in a row; overflows since the scale last grew

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.current_scale

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step with gradients divided by the scale, unless a gradient overflowed on any rank. Return whether it stepped."""
        interface = as_optimizer_interface(optimizer)
        stepped = not self._overflowed(interface)
        if stepped:
            interface.step(grad_scale=self.current_scale)
        self.update(stepped)
        return stepped

    def _overflowed(self, interface: OptimizerInterface) -> bool:
        assert self._comm is not None
        interface.reduce_pending()
        gradients = [x.grad for x in interface.tensors if x.grad is not None]
        finite = [all_finite(grad).to(self._comm.device) for grad in gradients]
        found = ~torch.stack(finite).all() if finite else torch.zeros((), device=self._comm.device)
        return bool(self._comm.all_reduce(found.float().view(1), "max").item())  # the only wait for the GPU

    def update(self, stepped: bool) -> None:
        """Change the scale after a step that was taken or, because a gradient overflowed, skipped."""
        if stepped:
            self._good_steps += 1
            if self._good_steps == self._interval:
                self.current_scale *= self._growth
                self._good_steps = self._overflows = 0
            return
        self._good_steps, self._overflows = 0, self._overflows + 1
        if self._overflows >= self._hysteresis:
            self.current_scale *= self._backoff

    def state_dict(self) -> dict[str, float]:
        """Return the state that training changes, which is equal on every rank."""
        return {"scale": self.current_scale, "good_steps": self._good_steps, "overflows": self._overflows}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.current_scale = float(state["scale"])
        self._good_steps, self._overflows = int(state["good_steps"]), int(state["overflows"])


def all_finite(x: Tensor) -> Tensor:
    """Return whether x has neither inf nor nan, as one boolean. Reads x once, where torch.isfinite(x) takes several passes.

    The least and the largest element are nan if any element is.
    """
    x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    ends = torch.stack(torch.aminmax(x)) if x.numel() else x
    return torch.isfinite(ends).all()
