"""One layer of the Transformer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.types import Device

from minipar.config.model_config import ModelConfig
from minipar.model.attention import Attention
from minipar.model.aux_loss import attach_aux_loss
from minipar.model.counter_dropout import dropout as counter_dropout
from minipar.model.latent_attention import LatentAttention
from minipar.model.mlp import SwiGLU
from minipar.model.moe import MoE
from minipar.model.norm import RMSNorm
from minipar.model.overrides import BlockOverrides

ATTENTION_SITE, MLP_SITE = 0, 1  # numbers that tell a layer's two dropout masks apart


class Block(nn.Module):
    """Pre-norm residual block: add attention over the tokens so far, then an MLP applied to each token.

    x, y        [B, T, D]
    positions   [T] or [B, T]  for rotary embeddings and attention's mask: each token's position in its document
    indices     [T] or [B, T]  each token's index in its sample, which keys dropout and the router's noise. None:
                `positions`, the same if each sample is one document
    sample_ids  [B]            each row's number in the step's batch; also keys dropout and the router's noise

    h = x + dropout(attention(norm(x)))
    y = h + dropout(mlp(norm(h)))      mlp: a SwiGLU, or an `MoE`, whose auxiliary losses are attached to y

    With `parallel_block`, attention and MLP have the same normed input, and their sum is added once, after one dropout:

    y = x + dropout(attention(norm(x)) + mlp(norm(x)))

    With a SwiGLU, tensor parallelism then sums once in the forward and once in the backward, not twice.
    Source of the parallel block: PaLM, arXiv:2204.02311, section 2, after GPT-J.

    `layer` is the block's number in the whole model; with `seed` it keys the dropout masks.
    """

    mlp: MoE | SwiGLU

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        seed: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        assert config.hidden_dim is not None
        self.layer, self.seed, self.dropout_rate = layer, seed, config.dropout
        self.overrides = BlockOverrides()
        norm = partial(RMSNorm, config.dim, config.norm_eps, device, dtype)
        self.attention_norm = norm()
        make = LatentAttention if config.kv_latent_dim else Attention
        self.attention = make(config, device, dtype)
        self.mlp_norm = None if config.parallel_block else norm()
        if config.has_experts(layer):
            moe = partial(MoE, layer=layer, seed=seed, device=device, dtype=dtype)
            self.mlp = moe(config.dim, config.hidden_dim, **config.moe_options)
        else:
            self.mlp = SwiGLU(config.dim, config.hidden_dim, device, dtype)

    def forward(
        self, x: Tensor, positions: Tensor, sample_ids: Tensor, step: int = 0, indices: Tensor | None = None
    ) -> Tensor:
        indices = positions if indices is None else indices
        if self.overrides.call is not None:
            return self.overrides.call(self._forward, x, positions, indices, sample_ids, step)
        return self._forward(x, positions, indices, sample_ids, step)

    def _forward(
        self, x: Tensor, positions: Tensor, indices: Tensor, sample_ids: Tensor, step: int
    ) -> Tensor:
        dropout = self.overrides.dropout or self.dropout
        if self.mlp_norm is None:
            normed = self.attention_norm(x)
            if self.overrides.attention_and_mlp is not None:
                both = self.overrides.attention_and_mlp(normed, positions)
            else:
                attention_out = self.attention(normed, positions)
                both = attention_out + self._feed_forward(normed, indices, sample_ids, step)
            return x + dropout(both, ATTENTION_SITE, indices, sample_ids, step)
        attention_out = self.attention(self.attention_norm(x), positions)
        x = x + dropout(attention_out, ATTENTION_SITE, indices, sample_ids, step)
        mlp_out = self._feed_forward(self.mlp_norm(x), indices, sample_ids, step)
        return x + dropout(mlp_out, MLP_SITE, indices, sample_ids, step)

    def _feed_forward(self, x: Tensor, indices: Tensor, sample_ids: Tensor, step: int) -> Tensor:
        if isinstance(self.mlp, SwiGLU):
            y: Tensor = self.mlp(x)
            return y
        y, metrics = self.mlp(x, indices, sample_ids, step)
        return attach_aux_loss(y, metrics.balance_loss + metrics.z_loss, self.mlp.loss_scale)

    def dropout(
        self, x: Tensor, site: int, indices: Tensor, sample_ids: Tensor, step: int, feature_offset: int = 0
    ) -> Tensor:
        if not (self.training and self.dropout_rate > 0):
            return x
        key = self.seed, step, self.layer, site
        return counter_dropout(x, self.dropout_rate, *key, sample_ids, indices, feature_offset)


def run_blocks(blocks: Iterable[nn.Module], x: Tensor, *args: object) -> Tensor:
    """Run blocks one after another; each gets the output of the previous block, and `args`."""
    for block in blocks:
        x = block(x, *args)
    return x
