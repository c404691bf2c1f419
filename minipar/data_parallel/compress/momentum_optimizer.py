"""The base of 1-bit Adam, 0/1 Adam and 1-bit LAMB: gradients stay each rank's own, and what is averaged is a momentum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minipar.data_parallel.arguments import function_of_parameter
from minipar.data_parallel.compress.all_reduce import CompressedMean
from minipar.data_parallel.compress.codecs import Sign, require_finite
from minipar.data_parallel.compress.plain_mean import Compressors, PlainMean
from minipar.mesh import placement_of


class MomentumOptimizer(torch.optim.Optimizer):
    """An optimizer that averages over ranks itself. The replicas must start alike; a missing gradient counts as zero.

    comm      the ranks that hold a replica, or a function from parameter to Comm
    warmup    the first steps, which average the gradients as they are
    compress  a function from Comm to a compressor of what is averaged later; default: signs, one scale a chunk
    reduces_warmup  False: somebody else, DDP say, averages the gradients of the warm-up

    `step` calls `_step(pairs, grads, warm)` with (group, parameter) pairs and the gradients by parameter, averaged in the
    warm-up. State, by parameter: "step", and what the optimizer adds.
    """

    def __init__(
        self, params, comm, defaults: dict, warmup: int, compress: Callable | None = None, reduces_warmup: bool = True,
        error_feedback: bool = True,
    ):  # fmt: skip
        super().__init__(params, defaults)
        self.warmup, self.reduces_warmup = warmup, reduces_warmup
        comm_of = function_of_parameter(comm)
        signs = partial(CompressedMean, codec=Sign(), error_feedback=error_feedback)
        self.compressors, self.plain = (
            Compressors(compress or signs, comm_of),
            Compressors(PlainMean, comm_of),
        )

    @torch.no_grad()
    def step(self, closure=None):
        """Step. Raises ArithmeticError, naming the parameter, for a gradient with nan or inf."""
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
        """The steps done, that in progress included."""
        return int(next((state["step"] for state in self.state.values()), 0))

    def _new_state(self, param: Tensor) -> dict:
        zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0), **zeros}

    def _step(self, pairs: list, grads: dict, warm: bool) -> None:
        raise NotImplementedError


def _name(param: Tensor) -> str:
    return placement_of(param).name if getattr(param, "placement", None) is not None else "a parameter"
