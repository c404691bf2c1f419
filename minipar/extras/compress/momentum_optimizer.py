"""The base of 1-bit Adam, 0/1 Adam and 1-bit LAMB, which average a momentum over ranks instead of gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from minipar.comm import Comm
from minipar.data_parallel.arguments import CommOf, ParamGroup
from minipar.extras.compress.codecs import Sign, require_finite
from minipar.extras.compress.compressed_buckets import Averages
from minipar.extras.compress.compressed_mean import CompressedMean
from minipar.extras.compress.plain_mean import Compressor, PlainMean, Tensors
from minipar.mesh import placement_of

Pairs = list[tuple[ParamGroup, Tensor]]
# The compressor of these papers: one scale for all signs of a chunk.
SIGNS: Callable[[Comm], Compressor] = partial(CompressedMean, codec=Sign())


class MomentumOptimizer(torch.optim.Optimizer):
    """An optimizer that averages over ranks itself. The replicas must start equal; a missing gradient counts as zero.

    comm      the Comm of the replicas, or a function from parameter to Comm
    warmup    number of first steps, in which gradients are averaged uncompressed and the variance settles: at least 1
    compress  a function from Comm to the compressor that averages after the warm-up; default: signs, one scale per chunk
    reduces_warmup  False: something else, such as DDP, averages the gradients of the warm-up

    `step` calls the subclass's `_step(pairs, grads, warm)`. The pairs are (group, parameter), and `grads` are averaged only
    in the warm-up. A parameter's state is "step", "exp_avg", "exp_avg_sq" and the tensors that the subclass adds.
    Raises ValueError for warmup below 1, ArithmeticError for a gradient that is not finite.
    """

    def __init__(
        self, params: ParamsT, comm: Comm | CommOf, warmup: int = 100, lr: float = 1e-3,
        betas: tuple[float, ...] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        compress: Callable[[Comm], Compressor] = SIGNS, reduces_warmup: bool = True,
    ):  # fmt: skip
        if warmup < 1:
            raise ValueError(f"warmup={warmup}; use at least 1 step, in which the variance settles")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.warmup, self.reduces_warmup = warmup, reduces_warmup
        self.compressors = Averages(compress, comm)
        self.plain = Averages(PlainMean, comm)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step, like torch's optimizers. Raises ArithmeticError, which names the parameter, for nan or inf."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(group, p) for group in self.param_groups for p in group["params"] if p.requires_grad]
        grads = {p: torch.zeros_like(p) if p.grad is None else p.grad for _, p in pairs}
        for param, grad in grads.items():
            require_finite(grad, f"the gradient of {_name(param)}")
        for _, param in pairs:
            if not self.state[param]:
                self.state[param].update(self._new_state(param))
            self.state[param]["step"] += 1
        warm = self.num_steps <= self.warmup
        if warm and self.reduces_warmup:
            grads = self.plain.means(grads)
        self._step(pairs, grads, warm)
        return loss

    @property
    def num_steps(self) -> int:
        """The number of steps so far, including the current one."""
        return int(next((state["step"] for state in self.state.values()), 0))

    def _new_state(self, param: Tensor) -> dict[str, Tensor]:
        zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0), **zeros}

    def _step(self, pairs: Pairs, grads: Tensors, warm: bool) -> None:
        raise NotImplementedError


def _name(param: Tensor) -> str:
    return placement_of(param).name if getattr(param, "placement", None) is not None else "a parameter"
