"""What the backward needs of the forward, and does not keep as it is: computed again, cut over tp, or sent to the CPU."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from minipar.chunks import chunk_sizes


def recompute(stage: nn.Module, mode: str) -> None:
    """Activation checkpointing: make every block of a stage forget what `mode` says, in place.

    none       nothing: the most memory, no extra work
    selective  the core of attention: its scores are many bytes and little work (Korthikanti et al., section 5)
    full       the whole block but its input: 2 B T D bytes a layer in bf16, for one more forward, a third more work
    """
    for block in stage.layers.values() if mode != "none" else ():
        if mode == "full":
            block.overrides.call = partial(checkpoint, use_reentrant=False)
        else:
            block.attention.overrides.core = partial(checkpoint, block.attention.core, use_reentrant=False)


def relocate_activations(stage: nn.Module, partition=None, offload: bool = False) -> None:
    """What blocks keep for their backward, make them keep elsewhere, in place. After `recompute`: then it is their inputs.

    partition  a Comm whose ranks all keep the same: each keeps 1/p of it instead, and the backward gathers it.
               Sends (p-1)/p of what is kept. ZeRO-R, P_a: arXiv:1910.02054, section 6.1
    offload    in CPU memory, pinned where it comes from a GPU. With `partition`, each its part: ZeRO-R, P_a+cpu
    """
    for block in stage.layers.values():
        if partition is not None or offload:
            block.overrides.call = partial(_relocating, block, block.overrides.call, partition, offload)


def _relocating(block: nn.Module, inner, partition, offload: bool, forward, *args):
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def keep(x: Tensor) -> _Kept | Tensor:
        if not x.is_floating_point() or x.untyped_storage().data_ptr() in weights:
            return x  # weights are there anyway
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
    """A saved tensor, or this rank's part of it, and what it was."""

    part: Tensor
    shape: torch.Size
    device: torch.device
    sizes: list[int] | None
