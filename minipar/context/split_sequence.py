"""The recipe: a model whose sequences are split over ranks.

Everything but attention treats tokens one by one, so only attention's `core` is replaced; and a token's position, by
which its queries and keys are turned, is its place in the whole sequence, so each rank says which tokens it has.

The gradient of every parameter is then a sum over the ranks, each with its own tokens: data parallelism sums it, over
dp x cp, as it sums over samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from minipar.context.all_gather import all_gather_attention
from minipar.context.attention_ring import ring_attention
from minipar.context.limits import check_context_parallel
from minipar.context.token_layout import local_positions
from minipar.context.ulysses import ulysses_attention
from minipar.context.usp import split_comm, usp_attention
from minipar.model import ModelConfig, Transformer
from minipar.model.groups import check_whole_groups


def context_parallel(
    model: Transformer,
    comm,
    layout: str = "zigzag",
    attention: str = "ring",
    impl: str = "auto",
    ulysses_size: int = 1,
    **options,
) -> Transformer:
    """Let the model, or a stage of it, cut over tp or not, take this rank's tokens of each sample; returns the model.

    comm          the cp ranks; each calls this with the same model
    layout        which tokens a rank has: see `layout.py`. Without positions given, the model takes those of the layout
    attention     "ring", "ulysses", "all_gather", or "usp": Ulysses over groups of `ulysses_size`, a ring over these
    impl          what computes a block, as in `flash_attention`
    options       further ones of that attention: `heads_at_once` of all_gather, `pad` of ulysses and usp

    Feed it `local_batch(...)` with the whole batch's `count`. A tied, frozen or absent parameter is as it was; there is
    nothing to place, for no parameter is cut.
    Raises ValueError where the heads cannot be cut so, or a routing group is longer than a rank's piece.
    """
    check_context_parallel(model.config, comm.size, None, layout, attention, ulysses_size, **options)
    core = _core(comm, layout, attention, impl, ulysses_size, options)
    for block in model.layers.values():
        block.attention.overrides.core = core
    model.overrides.default_positions = LocalPositions(
        model.config, comm.rank, comm.size, layout, ulysses_size
    )
    return model


def _core(comm, layout: str, attention: str, impl: str, ulysses_size: int, options: dict):
    common = dict(layout=layout, impl=impl, **options)
    if attention == "usp":
        return partial(usp_attention, *split_comm(comm, ulysses_size), **common)
    functions = {"ring": ring_attention, "ulysses": ulysses_attention, "all_gather": all_gather_attention}
    return partial(functions[attention], comm, **common)


@dataclass(frozen=True)
class LocalPositions:
    """The positions of this rank's tokens, where the caller does not say and samples hold one document."""

    config: ModelConfig
    rank: int
    size: int
    layout: str
    ulysses_size: int

    def __call__(self, tokens: int, device) -> Tensor:
        seq_len = tokens * self.size
        if seq_len > self.config.max_seq_len:
            raise ValueError(
                f"{self.size} ranks with {tokens} tokens a sample exceed max_seq_len={self.config.max_seq_len}"
            )
        positions = local_positions(seq_len, self.rank, self.size, self.layout, self.ulysses_size)
        if self.config.num_experts:
            check_whole_groups(positions, self.config.group_tokens)
        return positions.to(device)
