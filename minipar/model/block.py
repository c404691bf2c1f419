"""One layer of the Transformer."""

from __future__ import annotations

from torch import Tensor, nn

from minipar.model.attention import Attention
from minipar.model.aux_loss import attach_aux_loss
from minipar.model.counter_dropout import dropout as counter_dropout
from minipar.model.mlp import SwiGLU
from minipar.model.model_config import ModelConfig
from minipar.model.moe import MoE
from minipar.model.norm import RMSNorm
from minipar.model.overrides import BlockOverrides

ATTENTION_SITE, MLP_SITE = 0, 1  # which of a layer's two dropout masks


class Block(nn.Module):
    """Pre-norm residual block: add attention over the tokens so far, then the MLP of each token.

    x, y        [B, T, D]
    positions   [T] or [B, T]  for rotary embeddings and attention's mask: each token's position in its document
    indices     [T] or [B, T]  each token's index in its sample, which keys dropout and the router's noise. None: the
                positions, which are the same where a sample is one document
    sample_ids  [B]            each row's number in the step's batch, which keys them too

    h = x + dropout(attention(norm(x)))
    y = h + dropout(mlp(norm(h)))      mlp: a SwiGLU, or a mixture of experts, whose auxiliary losses are attached to y

    With `parallel_block`, attention and MLP read one norm's output, and their sum is added once, after one dropout:

    y = x + dropout(attention(norm(x)) + mlp(norm(x)))

    So tensor parallelism sums over ranks once forward and once backward, where the block above needs two of each.
    Source of the parallel block: PaLM, arXiv:2204.02311, section 2, after GPT-J.

    `layer` is the block's number in the whole model; with `seed` it keys the dropout masks.
    """

    def __init__(self, config: ModelConfig, layer: int, seed: int, device=None, dtype=None):
        super().__init__()
        self.layer, self.seed, self.dropout_rate = layer, seed, config.dropout
        self.overrides = BlockOverrides()
        factory = {"device": device, "dtype": dtype}
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, **factory)
        self.attention = Attention(config, **factory)
        self.mlp_norm = None if config.parallel_block else RMSNorm(config.dim, config.norm_eps, **factory)
        if config.has_experts(layer):
            options = config.moe_options
            self.mlp = MoE(config.dim, config.hidden_dim, layer=layer, seed=seed, **options, **factory)
        else:
            self.mlp = SwiGLU(config.dim, config.hidden_dim, **factory)

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
            both = self._attention_and_mlp(self.attention_norm(x), positions, indices, sample_ids, step)
            return x + dropout(both, ATTENTION_SITE, indices, sample_ids, step)
        attention_out = self.attention(self.attention_norm(x), positions)
        x = x + dropout(attention_out, ATTENTION_SITE, indices, sample_ids, step)
        mlp_out = self._feed_forward(self.mlp_norm(x), indices, sample_ids, step)
        return x + dropout(mlp_out, MLP_SITE, indices, sample_ids, step)

    def _attention_and_mlp(self, x: Tensor, positions: Tensor, *tokens_and_step) -> Tensor:
        if self.overrides.attention_and_mlp is not None:
            return self.overrides.attention_and_mlp(x, positions)
        return self.attention(x, positions) + self._feed_forward(x, *tokens_and_step)

    def _feed_forward(self, x: Tensor, indices: Tensor, sample_ids: Tensor, step: int) -> Tensor:
        if not isinstance(self.mlp, MoE):
            return self.mlp(x)
        y, metrics = self.mlp(x, indices, sample_ids, step)
        return attach_aux_loss(y, metrics.balance_loss + metrics.z_loss, self.mlp.loss_scale)

    def dropout(
        self, x: Tensor, site: int, indices: Tensor, sample_ids: Tensor, step: int, feature_offset: int = 0
    ) -> Tensor:
        if not (self.training and self.dropout_rate > 0):
            return x
        key = self.seed, step, self.layer, site
        return counter_dropout(x, self.dropout_rate, *key, sample_ids, indices, feature_offset)


def run_blocks(blocks: list[Block], x: Tensor, *args) -> Tensor:
    """Run blocks one after another, each with `args` besides its input."""
    for block in blocks:
        x = block(x, *args)
    return x
