"""Local SGD and DiLoCo: ranks train alone for H steps, then agree."""

from __future__ import annotations

import torch

from minipar.errors import require_positive


class DiLoCo:
    """Wrap an optimizer: after every `every` of its steps, move all ranks to one point by an outer step.

    d = mean over ranks of (w at the last agreement - w now)                          the outer gradient
    u = momentum u + d;   w = w at the last agreement - outer_lr (d + momentum u)     Nesterov's step

    outer_lr=1, momentum=0: local SGD, the mean of the ranks' parameters. DiLoCo: AdamW inside, outer_lr 0.7, momentum 0.9.
    With every=1, plain SGD of rate lr inside, outer_lr=1 and momentum=0 it is data parallelism.
    Sends 2(p-1)/p of the parameters once in `every` steps. Holds another copy of the parameters, with momentum two.
    The replicas must start alike; nothing else reduces gradients.
    Sources: local SGD, arXiv:1805.09767; DiLoCo, arXiv:2311.08105, algorithm 1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm,
        every: int = 50,
        outer_lr: float = 0.7,
        momentum: float = 0.9,
    ):
        require_positive(every=every)
        self.optimizer, self.comm, self.every = optimizer, comm, every
        self.outer_lr, self.momentum, self.num_steps = outer_lr, momentum, 0
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.agreed = [p.detach().clone() for p in self.params]
        self.velocity = [torch.zeros_like(x) for x in self.agreed] if momentum else []

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> bool:
        """Step the inner optimizer; return whether the ranks agreed after it."""
        with torch.enable_grad():
            self.optimizer.step()
        self.num_steps += 1
        if self.num_steps % self.every:
            return False
        flat = torch.cat([(a - p).flatten() for a, p in zip(self.agreed, self.params)])
        outer = self.comm.all_reduce(flat, "mean").split([p.numel() for p in self.params])
        for i, (param, agreed, d) in enumerate(zip(self.params, self.agreed, outer)):
            d = d.view_as(param)
            if self.momentum:
                self.velocity[i].mul_(self.momentum).add_(d)
                d = d + self.momentum * self.velocity[i]
            param.copy_(agreed.sub_(d, alpha=self.outer_lr))
        return True

    def state_dict(self) -> dict:
        outer = {"agreed": self.agreed, "velocity": self.velocity, "num_steps": self.num_steps}
        return {"inner": self.optimizer.state_dict(), **outer}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["inner"])
        self.num_steps = state["num_steps"]
        for own, saved in zip([*self.agreed, *self.velocity], [*state["agreed"], *state["velocity"]]):
            own.copy_(saved)
