"""An optimizer of FSDP's shards that keeps its states, and offloaded shards, in host memory or on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minipar.data_parallel.chunk_optimizer import ChunkOptimizer, step_chunks
from minipar.data_parallel.flat_parameters import FlatParameters
from minipar.data_parallel.fsdp import FSDP
from minipar.data_parallel.optimizer_interface import TorchOptimizerAdapter


class OffloadedOptimizer(TorchOptimizerAdapter):
    """The `OptimizerInterface` of `optimizer_cls` over the shards of FSDP modules; FSDP reduces the gradients.

    modules       made with `offload="cpu"` or "disk"; the optimizer's states are kept where the shards are
    groups        parameter groups of the modules' parameters
    master_dtype  dtype of the update; parameters of another dtype get master weights (FSDP may leave some whole in bf16)
    options       passed to `optimizer_cls`

    A step updates one flat buffer after another. With "disk", the next buffer is read and the previous one is written
    meanwhile.

    Bitwise equal to `optimizer_cls` over all parameters at once, if `optimizer_cls` updates each element or each parameter
    independently. With "disk", it holds the buffers that `Disk` describes, one chunk per buffer.
    """

    def __init__(
        self,
        modules: Iterable[FSDP],
        groups: list[dict[str, Any]],
        optimizer_cls: type[torch.optim.Optimizer],
        master_dtype: torch.dtype,
        **options: Any,
    ):
        defaults = optimizer_cls([nn.Parameter(torch.zeros(1))], **options).defaults
        self._groups = [{**defaults, **group} for group in groups]
        trained = [flat for module in modules for flat in module.flats if flat.trained]
        self._chunks = [
            ChunkOptimizer(
                flat, flat.comms[0], optimizer_cls, options, self._groups, master_dtype, flat.memory
            )
            for flat in trained
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._groups

    @property
    def tensors(self) -> list[Tensor]:
        return [param for group in self._groups for param in group["params"]]

    def tensors_and_states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for chunk in self._chunks:
            yield from chunk.tensors_and_states()
            _mark_written(chunk)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.tensors:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    @torch.no_grad()
    def step(self, *, grad_scale: float = 1.0) -> None:
        for chunk in step_chunks(self._chunks, self._groups, grad_scale):
            _mark_written(chunk)


def _mark_written(chunk: ChunkOptimizer[FlatParameters]) -> None:
    """Mark the shards as changed, because FSDP may still hold the old values that it gathered from them."""
    torch.autograd.graph.increment_version(chunk.bucket.params)
