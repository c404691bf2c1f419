"""Activation checkpointing: keep a block's input, and run its forward again when the backward comes."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

RECOMPUTE = ("none", "selective", "full")


def recompute(stage: nn.Module, mode: str) -> None:
    """Make every block of a stage forget what `mode` says, in place.

    none       nothing: the most memory, no extra work
    selective  the core of attention: its scores are many bytes and little work (Korthikanti et al., section 5)
    full       the whole block but its input: 2 B T D bytes a layer in bf16, for one more forward, a third more work
    """
    for block in stage.layers.values() if mode != "none" else ():
        if mode == "full":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        else:
            block.attention.core = partial(checkpoint, block.attention.core, use_reentrant=False)
