"""What a layer keeps for its backward, under tensor and sequence parallelism.

Korthikanti et al. count sbh(10 + 24/t + 5as/(ht)) bytes a layer under tensor parallelism and sbh/t (34 + 5as/h) with
sequence parallelism, for a GPT layer in 16 bits: what is outside the split matrices (the 10) is on every rank until the
tokens are split. The same account for this model's layer follows, in elements a token:

    norms      2 (3 D + 1)    input, its inverse root mean square, the unit vector, and that times the weight (the
                              input of q, k and v, or of gate and up)                         whole, or tokens / tp
    dropouts   2 D            bytes, not elements: a mask after each half                     whole, or tokens / tp
    attention  (2 D + 2 D_kv + H)/tp   q, k, v after the turn, the output (which is o's input), log-sum-exp    heads / tp
    mlp        4 F/tp         gate, silu(gate), up, and the product, which is down's input    features / tp

A key/value head that ranks share counts on each of them. To this come the turn's cosines and sines, T * head_dim a layer
whatever the batch. So with D_kv = D and F = 4 D: D (6 + 20/tp), and 26 D/tp with sequence parallelism.

Written-out ("plain") attention keeps, in place of the attention line, repeated keys and values and the probabilities,
(4 D + H T)/tp, and the T*T bytes of the causal mask: this is what Korthikanti's 5as/h is about, and what fused attention
(their "selective recomputation") does without.

Source: arXiv:2205.05198, section 4 and table 2.
"""

from __future__ import annotations

import torch

from minipar.model.model_config import ModelConfig


def layer_activation_bytes(
    config: ModelConfig,
    batch: int,
    tokens: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Bytes that one layer keeps on each of tp ranks from its forward to its backward, by what keeps them.

    tokens  of a sample, all of them: the shards of sequence parallelism are counted here
    dtype   of 32 bits or more
    """
    whole = batch * tokens
    here = whole // tp if sequence_parallel else whole
    plain = config.attention == "plain"
    return {
        "norms": 2 * (3 * config.dim + 1) * here * dtype.itemsize,
        "attention": attention_elems(config, tokens, tp) * whole * dtype.itemsize,
        "mlp": 4 * config.hidden_dim // tp * whole * dtype.itemsize,
        "dropouts": 2 * config.dim * here if config.dropout else 0,
        "positions": tokens * config.head_dim * dtype.itemsize + (tokens * tokens if plain else 0),
    }


def attention_elems(config: ModelConfig, tokens: int, tp: int = 1) -> int:
    """Elements a token that attention keeps between its projections and through its output."""
    heads = config.num_heads // tp
    if config.attention == "plain":
        return 4 * heads * config.head_dim + heads * tokens
    kv_heads = max(1, config.num_kv_heads // tp)
    return (2 * heads + 2 * kv_heads) * config.head_dim + heads
