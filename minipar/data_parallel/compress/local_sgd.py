"""Local SGD, post-local SGD and DiLoCo: ranks train alone for H steps, then agree."""

from __future__ import annotations

import torch

from minipar.data_parallel.arguments import function_of_parameter
from minipar.data_parallel.compress.plain_mean import Compressors, PlainMean
from minipar.errors import require_positive


class DiLoCo:
    """Wrap an optimizer: after every `every` of its steps, move all ranks to one point by an outer step.

    d = mean over ranks of (w at the last agreement - w now)                          the outer gradient
    u = momentum u + d;   w = w at the last agreement - outer_lr (d + momentum u)     Nesterov's step

    outer_lr=1, momentum=0: local SGD, the mean of the ranks' parameters. DiLoCo: AdamW inside, outer_lr 0.7, momentum 0.9.
    With every=1, plain SGD of rate lr inside, outer_lr=1 and momentum=0 it is data parallelism.
    warmup: the first steps average gradients instead, so that the replicas stay equal: post-local SGD. `reduces_warmup`
    False: somebody else, DDP say, averages them. Agreements come after the steps whose number `every` divides.
    Sends 2(p-1)/p of the parameters once in `every` steps. Holds another copy of the parameters, with momentum two.
    The replicas must start alike; nothing else reduces gradients. `comm`: the ranks, or a function from parameter to Comm.
    Sources: local SGD, arXiv:1805.09767; post-local SGD, arXiv:1808.07217; DiLoCo, arXiv:2311.08105, algorithm 1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm,
        every: int = 50,
        outer_lr: float = 0.7,
        momentum: float = 0.9,
        warmup: int = 0,
        reduces_warmup: bool = True,
    ):
        require_positive(every=every)
        self.optimizer, self.every, self.warmup, self.reduces_warmup = (
            optimizer,
            every,
            warmup,
            reduces_warmup,
        )
        self.outer_lr, self.momentum, self.num_steps = outer_lr, momentum, 0
        self.plain = Compressors(PlainMean, function_of_parameter(comm))
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.agreed = [p.detach().clone() for p in self.params]
        self.velocity = [torch.zeros_like(x) for x in self.agreed] if momentum else []

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> bool:
        """Step the inner optimizer; return whether the ranks agreed after it."""
        self.num_steps += 1
        warm = self.num_steps <= self.warmup
        if warm and self.reduces_warmup:
            grads = {p: torch.zeros_like(p) if p.grad is None else p.grad for p in self.params}
            for param, grad in self.plain.means(grads).items():
                param.grad = grad
        with torch.enable_grad():
            self.optimizer.step()
        if warm:
            for agreed, param in zip(self.agreed, self.params):
                agreed.copy_(param)
        if warm or self.num_steps % self.every:
            return warm
        self._agree()
        return True

    def _agree(self) -> None:
        outer = self.plain.means({p: a - p for a, p in zip(self.agreed, self.params)})
        for i, (param, agreed) in enumerate(zip(self.params, self.agreed)):
            d = outer[param]
            if self.momentum:
                self.velocity[i].mul_(self.momentum).add_(d)
                d = d + self.momentum * self.velocity[i]
            param.copy_(agreed.sub_(d, alpha=self.outer_lr))

    def state_dict(self) -> dict:
        outer = {"agreed": self.agreed, "velocity": self.velocity, "num_steps": self.num_steps}
        return {"inner": self.optimizer.state_dict(), **outer}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["inner"])
        self.num_steps = state["num_steps"]
        for own, saved in zip([*self.agreed, *self.velocity], [*state["agreed"], *state["velocity"]]):
            own.copy_(saved)
