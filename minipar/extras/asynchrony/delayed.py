"""Delayed data parallelism: the gradients of step k are applied at step k + d.

    step            0        1        2        3
    computes        g0       g1       g2       g3       at the weights of its own step
    applies, d=2    -        -        g0       g1       while g1 and g2 would be on their way

It is a simulation: DDP or FSDP reduces gradients at once, and the reduced gradients wait. The numbers are those of a run
whose reductions take d steps; its speed is not shown.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from minipar.data_parallel.arguments import CommOf, ParamGroup
from minipar.data_parallel.optimizer_interface import OptimizerInterface, TorchOptimizerAdapter
from minipar.mesh import Placement, placement_of
from minipar.train.averaging import Averager
from minipar.train.checkpoint.saver import StoredPart
from minipar.train.optim import Group

if TYPE_CHECKING:
    from minipar.config.train_config import TrainConfig
    from minipar.train.checkpoint.restore import Checkpoint
    from minipar.train.parallelize import RankState

KIND = "delayed"  # the kind of these parts in a checkpoint
Gradients = list[Tensor | None]  # of the optimizer's parameters, in their order; None where there is none


class DelayedOptimizer(TorchOptimizerAdapter):
    """An `OptimizerInterface` around a torch optimizer that uses each step's gradients `delay` steps later.

        g(k)   = gradient of step k at w(k), reduced and clipped
        w(k+1) = w(k) - lr(k) u(g(k - d))        for k >= d, where u is the optimizer's update; before that w(k+1) = w(k)

    With d = 0 it is the optimizer itself, bit for bit. The optimizer's own count of steps starts at step d.

    Costs d copies of the gradients, and stability: the largest stable rate of gradient descent on a quadratic falls to
    `largest_stable_rate(d)` of its value, half for d = 1. Saves the wait for the reduction, which has d steps to hide
    behind: with d = 1, a step takes max(computation, messages). A longer delay saves more only where the time of messages
    varies, since a link still carries one reduction a step.
    Sources: delayed updates, arXiv:0911.0491, algorithm 1; all-reduce in the background, Pipe-SGD, arXiv:1811.03619.
    """

    def __init__(self, optimizer: Optimizer, delay: int):
        super().__init__(optimizer)
        self.delay = delay
        self.waiting: deque[Gradients] = deque()  # the oldest first

    def step(self, *, grad_scale: float = 1.0) -> Any:
        gradients = [
            None if p.grad is None else p.grad.as_subclass(Tensor) / grad_scale for p in self.tensors
        ]
        self.waiting.append(gradients)
        if len(self.waiting) <= self.delay:
            return None
        for param, gradient in zip(self.tensors, self.waiting.popleft()):
            param.grad = gradient
        return self.optimizer.step()


class DelayedInOneProcess:
    """A torch optimizer whose step k uses the gradients that the parameters had at step k - delay; none before that."""

    def __init__(self, optimizer: Optimizer, delay: int):
        self.optimizer, self.delay = optimizer, delay
        self.history: list[dict[Tensor, Tensor]] = []

    @property
    def param_groups(self) -> list[ParamGroup]:
        return self.optimizer.param_groups

    def step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        self.history.append({p: p.grad.clone() for p in params if p.grad is not None})
        step = len(self.history) - 1
        if step >= self.delay:
            for param in params:
                param.grad = self.history[step - self.delay].get(param)
            self.optimizer.step()


def largest_stable_rate(delay: int) -> float:
    """Return the fraction of the largest stable learning rate that is left with this delay: sin(pi / (4 d + 2)).

    It is that of w(k+1) = w(k) - a w(k-d), which goes to 0 for 0 < a < 2 sin(pi / (4 d + 2)).
    """
    return math.sin(math.pi / (4 * delay + 2))


class DelayedAveraging(Averager):
    """Plain averages of gradients, which an optimizer of its own applies later."""

    def __init__(self, config: TrainConfig):
        super().__init__(config)
        self.delay: int = config.options["compress"].delay

    def make_optimizer(
        self, groups: list[Group], optimizer_cls: type[Optimizer], comm_of: CommOf, **options: Any
    ) -> OptimizerInterface:
        return DelayedOptimizer(optimizer_cls(groups, **options), self.delay)

    def in_one_process(self, optimizer: Optimizer) -> DelayedInOneProcess:
        return DelayedInOneProcess(optimizer, self.delay)

    def stored_parts(self, state: RankState) -> Iterator[StoredPart]:
        return _waiting_parts(state.optimizer)

    @torch.no_grad()
    def restore(self, state: RankState, checkpoint: Checkpoint) -> None:
        """Load the gradients that wait, on any mesh; none of a run without delay."""
        optimizer = state.optimizer
        assert isinstance(optimizer, DelayedOptimizer)
        optimizer.waiting.clear()
        placements = [placement_of(p) for p in optimizer.tensors]
        for number in count():
            names = [_waiting(number, placement) for placement in placements]
            found = [checkpoint.read(KIND, x) if checkpoint.has(KIND, x.name) else None for x in names]
            if not any(checkpoint.has(KIND, x.name) for x in names):
                return
            optimizer.waiting.append(
                [x if x is None else x.to(p.device) for x, p in zip(found, optimizer.tensors)]
            )


def _waiting_parts(optimizer: OptimizerInterface) -> Iterator[StoredPart]:
    assert isinstance(optimizer, DelayedOptimizer)
    for number, gradients in enumerate(optimizer.waiting):
        for param, gradient in zip(optimizer.tensors, gradients):
            placement = placement_of(param)
            if gradient is not None and gradient.numel() and placement.tied_to is None:
                yield StoredPart(KIND, _waiting(number, placement), gradient)


def _waiting(number: int, placement: Placement) -> Placement:
    name = placement.tied_to or placement.name
    return replace(placement, name=f"waiting gradient {number} of {name}", tied_to=None)
