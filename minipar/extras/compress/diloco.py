"""DiLoCo: ranks train independently for H steps, then take an outer step by the mean of their ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.data_parallel.arguments import CommOf
from minipar.data_parallel.optimizer_interface import TorchOptimizerAdapter
from minipar.extras.compress.compressed_buckets import Averages
from minipar.extras.compress.plain_mean import PlainMean
from minipar.support.errors import require_positive


class DiLoCo(TorchOptimizerAdapter):
    """Wrap an inner optimizer. Once in `every` steps, an outer step synchronises the ranks' weights.

    d = mean over ranks of (w at the last outer step - w now)                          the outer gradient
    u = momentum u + d;   w = w at the last outer step - outer_lr (d + momentum u)     Nesterov's step

    The paper uses AdamW as the inner optimizer. With outer_lr=1 and momentum=0 the weights are averaged, which is local
    SGD; with plain SGD inside and every=1, it is then data parallelism.

    With warmup=n, the first n steps average gradients instead, so the replicas stay equal (post-local SGD). With
    reduces_warmup=False, something else, such as DDP, averages these gradients. The ranks synchronise after each step
    whose number is a multiple of `every`.
    Sends 2(p-1)/p of the parameters once in `every` steps. Holds two more copies of the parameters.
    The replicas must start equal, and after the warm-up nothing else may reduce gradients. `comm` is the ranks' Comm, or a
    function from parameter to Comm.
    Sources: local SGD, arXiv:1805.09767; post-local SGD, arXiv:1808.07217; DiLoCo, arXiv:2311.08105, algorithm 1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Comm | CommOf,
        every: int = 50,
        outer_lr: float = 0.7,
        momentum: float = 0.9,
        warmup: int = 0,
        reduces_warmup: bool = True,
    ):
        require_positive(every=every)
        super().__init__(optimizer)
        self.every = every
        self.outer_lr, self.momentum = outer_lr, momentum
        self.warmup, self.reduces_warmup = warmup, reduces_warmup
        self.num_steps = 0
        self.plain = Averages(PlainMean, comm)
        self.agreed: dict[Tensor, Tensor] = {p: p.detach().clone() for p in self.tensors}
        self.state = {p: {"velocity": torch.zeros_like(p)} for p in self.agreed}

    @torch.no_grad()
    def step(self, *, grad_scale: float = 1.0) -> None:
        """Step the inner optimizer, and synchronise if it is time."""
        self.num_steps += 1
        warm = self.num_steps <= self.warmup
        if warm and self.reduces_warmup:
            grads = {p: torch.zeros_like(p) if p.grad is None else p.grad for p in self.agreed}
            for param, grad in self.plain.means(grads).items():
                param.grad = grad
        with torch.enable_grad():
            super().step(grad_scale=grad_scale)
        if warm:
            for param, agreed in self.agreed.items():
                agreed.copy_(param)
        elif self.num_steps % self.every == 0:
            self._agree()

    def _agree(self) -> None:
        outer = self.plain.means({p: agreed - p for p, agreed in self.agreed.items()})
        for param, agreed in self.agreed.items():
            velocity = self.state[param]["velocity"].mul_(self.momentum).add_(outer[param])
            d = outer[param] + self.momentum * velocity
            param.copy_(agreed.sub_(d, alpha=self.outer_lr))

    # Checkpoints. Ranks share the outer velocity; each has its own inner state.

    def tensors_and_states(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        return iter(self.state.items())

    def own_states(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for param in self.agreed:
            state = self.optimizer.state.get(param, {})
            yield param, {name: x for name, x in state.items() if x.dim()}

    @torch.no_grad()
    def resume(self, step: int, own: Mapping[Tensor, dict[str, Tensor]]) -> None:
        """Continue from the restored weights and states of step `step`, at which all ranks' weights were equal."""
        self.num_steps = step
        for param, agreed in self.agreed.items():
            agreed.copy_(param)
            if own[param]:
                self.optimizer.state[param] = {"step": torch.tensor(float(step)), **own[param]}
