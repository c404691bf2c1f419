"""Activation checkpointing, and saved activations partitioned over tp or offloaded to the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from minipar.chunks import chunk_sizes
from minipar.model.block import run_blocks
from minipar.train.check_config import blocks_per_unit


def recompute(stage: nn.Module, mode: str) -> None:
    """Apply activation checkpointing to every block of a stage, in place: `mode` says what the backward recomputes.

    none       nothing: the most memory, no extra work
    selective  the attention core: its scores are many bytes and little work (Korthikanti et al., section 5)
    full       the whole block; its input is kept, 2 B T D bytes per layer in bf16. One more forward, a third more work
    every:N    units of N successive blocks: of a unit, its first block's input is kept. The same work as full

    Kept by L blocks whose input is x bytes and which save a bytes each, and alive at most during the backward:

    none       L a                 L a
    full       L x                 L x + a
    every:N    ceil(L/N) x         ceil(L/N) x + N a          least where N is about sqrt(L x / a)

    Blocks under FSDP are unsharded once more for every:N, to be recomputed, but for the last of each unit.
    Raises ValueError for another mode.
    Source: Chen et al., arXiv:1604.06174, section 4; Megatron-LM's --recompute-method uniform.
    """
    size = blocks_per_unit(mode)
    again = partial(checkpoint, use_reentrant=False)
    if size is not None:
        stage.overrides.run_blocks = _Units(size, again)
    for block in stage.layers.values() if mode in ("selective", "full") else ():
        if mode == "full":
            block.overrides.call = again
        else:
            block.attention.overrides.core = partial(checkpoint, block.attention.core, use_reentrant=False)


@dataclass
class _Units:
    """Run a stage's blocks in units of `size`, each through `call`: (forward, x, *args) -> x."""

    size: int
    call: Callable

    def __call__(self, blocks: list[nn.Module], x: Tensor, *args) -> Tensor:
        for first in range(0, len(blocks), self.size):
            x = self.call(partial(run_blocks, blocks[first : first + self.size]), x, *args)
        return x


def relocate_activations(stage: nn.Module, partition=None, offload: bool = False) -> None:
    """Partition or offload, in place, what blocks save for the backward: with recompute="full" or "every:N", inputs.

    Call it after `recompute`, whose wrapper it wraps.

    partition  a Comm whose ranks all save the same tensors: each keeps 1/p of a tensor, and the backward all-gathers it.
               Sends (p-1)/p of what is saved. ZeRO-R, P_a: arXiv:1910.02054, section 6.1
    offload    to CPU memory, pinned where the tensor is on a GPU. With `partition`, each rank its part: ZeRO-R, P_a+cpu
    """
    if partition is None and not offload:
        return
    if (units := stage.overrides.run_blocks) is not None:
        # A checkpoint saves its inputs alone; and the blocks' weights may be freed here.
        units.call = partial(_relocating, tuple, units.call, partition, offload)
        return
    for block in stage.layers.values():
        block.overrides.call = partial(
            _relocating, block.parameters, block.overrides.call, partition, offload
        )


def _relocating(parameters: Callable, inner, partition, offload: bool, forward, *args):
    weights = {p.untyped_storage().data_ptr() for p in parameters()}

    def keep(x: Tensor) -> _Kept | Tensor:
        if not x.is_floating_point() or x.untyped_storage().data_ptr() in weights:
            return x  # weights stay in memory anyway
        part, sizes = x.detach(), None
        if partition is not None:
            sizes = chunk_sizes(x.numel(), partition.size)
            part = part.reshape(-1).split(sizes)[partition.rank].clone()
        if offload:
            away = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            part = away.copy_(part, non_blocking=True)
        return _Kept(part, x.shape, x.device, sizes)

    def bring(kept: _Kept | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        part = kept.part.to(kept.device, non_blocking=True)
        return part if kept.sizes is None else partition.all_gather(part, sizes=kept.sizes).view(kept.shape)

    with saved_tensors_hooks(keep, bring):
        return forward(*args) if inner is None else inner(forward, *args)


class _Kept(NamedTuple):
    """A saved tensor, or this rank's part of it, and what is needed to restore it."""

    part: Tensor
    shape: torch.Size
    device: torch.device
    sizes: list[int] | None
