"""Activation checkpointing, and saved activations partitioned over tp or offloaded to the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from minipar.comm import Comm
from minipar.comm.repeated import without_messages
from minipar.config.rules import blocks_per_unit
from minipar.model import Block, Transformer
from minipar.model.block import run_blocks
from minipar.support.chunks import chunk_sizes


def recompute(stage: Transformer, mode: str, kept_of: Sequence[Comm] = ()) -> None:
    """Apply activation checkpointing to every block of a stage, in place: `mode` says what the backward recomputes.

    none       nothing: the most memory, no extra work
    selective  the attention core: its scores are many bytes and little work (Korthikanti et al., section 5)
    full       the whole block; its input is kept, 2 B T D bytes per layer in bf16. One more forward, a third more work
    every:N    units of N successive blocks; the input of each unit's first block is kept. The same work as full

    The bytes that L blocks hold after the forward, and the maximum during the backward, if a block saves a bytes, and x
    bytes of them are its input:

    none       L a                 L a
    full       L x                 L x + a
    every:N    ceil(L/N) x         ceil(L/N) x + N a          least if N is about sqrt(L x / a)

    kept_of  Comms whose collectives' results the forward keeps, so that the recomputation, with "full" or "every:N", does
             not send them again: `comm/repeated.py`

    With every:N, FSDP unshards each block once more for its recomputation, except the last block of each unit.
    Raises ValueError for another mode.
    Source: Chen et al., arXiv:1604.06174, section 4; Megatron-LM's --recompute-method uniform.
    """
    size = blocks_per_unit(mode)
    again: Callable[..., Any] = partial(checkpoint, use_reentrant=False)
    if kept_of:
        again = partial(again, context_fn=partial(without_messages, tuple(kept_of)))
    if size is not None:
        stage.overrides.run_blocks = _Units(size, again)
    for block in _blocks(stage) if mode in ("selective", "full") else ():
        if mode == "full":
            block.overrides.call = again
        else:
            block.attention.overrides.core = partial(checkpoint, block.attention.core, use_reentrant=False)


def _blocks(stage: Transformer) -> list[Block]:
    return [module for module in stage.modules() if isinstance(module, Block)]


@dataclass
class _Units:
    """Run a stage's blocks in units of `size`; `call`, (forward, x, *args) -> x, runs each unit."""

    size: int
    call: Callable[..., Tensor]

    def __call__(self, blocks: list[Block], x: Tensor, *args: Any) -> Tensor:
        for first in range(0, len(blocks), self.size):
            x = self.call(partial(run_blocks, blocks[first : first + self.size]), x, *args)
        return x


def relocate_activations(
    stage: Transformer,
    partition: Comm | None = None,
    offload: bool = False,
    when: Callable[[], bool] = lambda: True,
) -> None:
    """Partition or offload, in place, what blocks save for the backward: with recompute="full" or "every:N", their inputs.

    Call it after `recompute`, whose wrapper it wraps.

    partition  a Comm whose ranks all save the same tensors: each keeps 1/p of a tensor, and the backward all-gathers it.
               Sends (p-1)/p of what is saved. ZeRO-R, P_a: arXiv:1910.02054, section 6.1
    offload    move to CPU memory, pinned if the tensor is on a GPU. With `partition`, each rank moves its part: P_a+cpu
    when       called before each forward of a block, or of a unit of blocks; returns whether to do so in this forward
    """
    if partition is None and not offload:
        return
    if isinstance(units := stage.overrides.run_blocks, _Units):
        # An activation checkpoint saves only its inputs, never the blocks' weights: there are no weights to leave out.
        units.call = partial(_relocating, tuple, units.call, partition, offload, when)
        return
    for block in _blocks(stage):
        block.overrides.call = partial(
            _relocating, block.parameters, block.overrides.call, partition, offload, when
        )


def _relocating(
    parameters: Callable[[], Iterable[nn.Parameter]],
    inner: Callable[..., Tensor] | None,
    partition: Comm | None,
    offload: bool,
    when: Callable[[], bool],
    forward: Callable[..., Tensor],
    *args: Any,
) -> Tensor:
    if not when():
        return forward(*args) if inner is None else inner(forward, *args)
    weights = {p.untyped_storage().data_ptr() for p in parameters()}
    parts: dict[object, tuple[weakref.ref[torch.UntypedStorage], Tensor]] = {}

    def keep(x: Tensor) -> _Kept | Tensor:
        """Keep this rank's part of x, once for all operations that save the same elements."""
        storage = x.untyped_storage()
        if not x.is_floating_point() or storage.data_ptr() in weights:
            return x  # weights stay in memory anyway
        sizes = None if partition is None else chunk_sizes(x.numel(), partition.size)
        layout = x.numel() if x.is_contiguous() else (x.shape, x.stride())
        elements = storage.data_ptr(), x.storage_offset(), layout, x.dtype, x._version
        if (
            elements not in parts or parts[elements][0]() is not storage
        ):  # freed memory may belong to another tensor by now
            parts[elements] = weakref.ref(storage), part_of(x, sizes)
        return _Kept(parts[elements][1], x.shape, x.device, sizes)

    def part_of(x: Tensor, sizes: list[int] | None) -> Tensor:
        part = x.detach()
        if partition is not None and sizes is not None:
            part = part.reshape(-1).split(sizes)[partition.rank].clone()
        return to_cpu(part) if offload else part

    def bring(kept: _Kept | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        part = kept.part.to(kept.device, non_blocking=True)
        whole = part if partition is None else partition.all_gather(part, sizes=kept.sizes)
        return whole.view(kept.shape)

    with saved_tensors_hooks(keep, bring):
        return forward(*args) if inner is None else inner(forward, *args)


def to_cpu(x: Tensor) -> Tensor:
    """Return a copy of x in CPU memory, pinned if x is on a GPU; the copy may still be under way."""
    away = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return away.copy_(x, non_blocking=True)


class _Kept(NamedTuple):
    """A saved tensor, or this rank's part of it, and what is needed to restore it."""

    part: Tensor
    shape: torch.Size
    device: torch.device
    sizes: list[int] | None
