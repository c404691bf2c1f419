"""Context parallelism of the whole model: each rank runs it on its own tokens of every sequence.

Everything but attention acts on each token separately, so only attention's `core` is replaced. RoPE rotates queries and
keys by a token's index in the whole sequence, so the model's default positions become the indices of this rank's tokens.

Each rank computes its own tokens' part of every gradient: data parallelism sums the parts over dp x cp, as it does for
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.config.mesh_rules import check_context_parallel
from minipar.config.model_config import ModelConfig
from minipar.context.all_gather import all_gather_attention
from minipar.context.attention_ring import ring_attention
from minipar.context.token_layout import local_positions
from minipar.context.ulysses import ulysses_attention
from minipar.context.usp import split_comm, usp_attention
from minipar.model import Block, Transformer
from minipar.model.groups import check_whole_groups
from minipar.support.staging import to_device


def context_parallel(
    model: Transformer,
    comm: Comm,
    layout: str = "zigzag",
    attention: str = "ring",
    impl: str = "auto",
    ulysses_size: int = 1,
    **options: Any,
) -> Transformer:
    """Make the model, or a pipeline stage of it, take this rank's tokens of each sample, in place; returns the model.

    model         the model or stage, with or without tensor parallelism
    comm          the cp ranks; each calls this with the same model
    layout        which tokens a rank has: see `token_layout.py`. If the caller gives no positions, the layout's are used
    attention     "ring", "ulysses", "all_gather", or "usp": Ulysses inside groups of `ulysses_size`, a ring across them
    impl          the implementation that computes a block, as in `flash_attention`
    options       options of `attention`: `heads_at_once` for all_gather, `pad` for ulysses and usp

    Call `model.loss` with `local_batch(...)` and the whole batch's `count`. No parameter is split, so placements, and tied
    and frozen parameters, are unchanged.
    Raises ValueError if ulysses_size does not divide cp, the heads cannot be split, or the layout would split routing
    groups: here if the whole sequence is one group, otherwise in the model's forward.
    """
    tp = _tensor_parallel_size(model)
    check_context_parallel(model.config, comm.size, None, layout, attention, ulysses_size, tp, **options)
    core = _core(comm, layout, attention, impl, ulysses_size, options)
    for block in model.layers.values():
        assert isinstance(block, Block)
        block.attention.overrides.core = core
    model.overrides.default_positions = LocalPositions(
        model.config, comm.rank, comm.size, layout, ulysses_size
    )
    return model


def _tensor_parallel_size(model: Transformer) -> int:
    """Return the number of tp ranks over which the model's heads are split."""
    block = next(iter(model.layers.values()), None)
    return model.config.num_heads // block.attention.num_heads if isinstance(block, Block) else 1


def _core(
    comm: Comm, layout: str, attention: str, impl: str, ulysses_size: int, options: dict[str, Any]
) -> Callable[..., Tensor]:
    common = dict(layout=layout, impl=impl, **options)
    if attention == "usp":
        return partial(usp_attention, *split_comm(comm, ulysses_size), **common)
    return partial(ATTENTIONS[attention], comm, **common)


ATTENTIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"ring": ring_attention, "ulysses": ulysses_attention, "all_gather": all_gather_attention}
)


@dataclass(frozen=True)
class LocalPositions:
    """Default positions: the indices of this rank's tokens in the whole sequence, for samples of one document."""

    config: ModelConfig
    rank: int
    size: int
    layout: str
    ulysses_size: int

    def __call__(self, tokens: int, device: torch.device) -> Tensor:
        seq_len = tokens * self.size
        if seq_len > self.config.max_seq_len:
            raise ValueError(
                f"{self.size} ranks with {tokens} tokens a sample exceed max_seq_len={self.config.max_seq_len}"
            )
        positions = local_positions(seq_len, self.rank, self.size, self.layout, self.ulysses_size)
        if self.config.num_experts:
            check_whole_groups(positions, self.config.group_tokens)
        return to_device(positions, device)
