"""Activation memory that a layer keeps for its backward, under tensor and sequence parallelism.

Korthikanti et al. count sbh(10 + 24/t + 5as/(ht)) bytes per layer under tensor parallelism and sbh/t (34 + 5as/h) with
sequence parallelism, for a GPT layer in 16 bits: activations outside the split matrices (the 10) are whole on every rank
unless sequence parallelism shards them by tokens. The same count for this model's layer, in elements per token:

    norms      2 (3 D + 1)    input, its inverse root mean square, the normalized input, and that times the weight (the
                              input of q, k and v, or of gate and up)                         whole, or tokens / tp
    dropouts   2 D            bytes, not elements: a mask after attention, one after the MLP  whole, or tokens / tp
    attention  (2 D + 2 D_kv + H)/tp   q, k after RoPE, v, the output (which is o's input), log-sum-exp        heads / tp
    mlp        4 F/tp         gate, silu(gate), up, and the product, which is down's input    features / tp

A key/value head that several ranks share counts on each of them. RoPE's cosines and sines add T * head_dim per layer,
whatever the batch. So with D_kv = D and F = 4 D: D (6 + 20/tp), and 26 D/tp with sequence parallelism.

A parallel block has one norm, whose output is the input of all five matrices, and one dropout: half of these two lines.

With attention="plain" the attention line is (4 D + H T)/tp instead: q, repeated keys and values, the output and the
probabilities; and the causal mask adds T*T bytes. Korthikanti's 5as/h counts these probabilities, which fused attention
does not keep (nor does their "selective recomputation").

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
    """Return the bytes that one layer keeps per rank from its forward to its backward, by part of the layer.

    tokens  per sample, before sequence parallelism shards them
    dtype   of 32 bits or more
    """
    all_tokens = batch * tokens
    local_tokens = all_tokens // tp if sequence_parallel else all_tokens
    plain, halves = config.attention == "plain", 1 if config.parallel_block else 2
    return {
        "norms": halves * (3 * config.dim + 1) * local_tokens * dtype.itemsize,
        "attention": attention_elems(config, tokens, tp) * all_tokens * dtype.itemsize,
        "mlp": 4 * config.hidden_dim // tp * all_tokens * dtype.itemsize,
        "dropouts": halves * config.dim * local_tokens if config.dropout else 0,
        "positions": tokens * config.head_dim * dtype.itemsize + (tokens * tokens if plain else 0),
    }


def attention_elems(config: ModelConfig, tokens: int, tp: int = 1) -> int:
    """Return the elements per token and rank that attention keeps, from q, k and v to its output."""
    heads = config.num_heads // tp
    if config.attention == "plain":
        return 4 * heads * config.head_dim + heads * tokens
    kv_heads = max(1, config.num_kv_heads // tp)
    return (2 * heads + 2 * kv_heads) * config.head_dim + heads
