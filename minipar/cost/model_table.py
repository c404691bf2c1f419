"""Sizes of known models: Llama 2 and 3, GPT-3, and mixtures of few large and of many small experts."""

from __future__ import annotations

from minipar.cost.models import ModelShape
from minipar.cost.toml_table import find


def gpt(
    name: str, num_layers: int, dim: int, num_heads: int, vocab_size: int = 51200, positions: int = 2048
) -> ModelShape:
    """Return GPT-2's shape at these sizes: LayerNorm, biases, GELU, dropout, learned positions, tied embeddings."""
    return ModelShape(
        name, num_layers, dim, num_heads, 4 * dim, vocab_size, gated=False, bias=True, norm_params=2,
        positions=positions, tie_embeddings=True, dropout=True,
    )  # fmt: skip


# Llama 2: arXiv:2307.09288; Llama 3: arXiv:2407.21783, table 3; Mixtral: arXiv:2401.04088, table 1 (it has no capacity
# limit, so the factor is 1); GPT-3: arXiv:2005.14165, table 2.1, with the vocabulary padded for tensor parallelism. The
# DeepSeek-like model has DeepSeekMoE 16B's sizes (arXiv:2401.06066), but with experts in its first layer, too.
# DeepSeek-V3: arXiv:2412.19437, section 4.2, without its module for a second token. Qwen3: arXiv:2505.09388, tables 1
# and 2, and the models' configurations. gpt-oss: arXiv:2508.10925, whose every second layer attends to 128 tokens alone
# (counted here as full attention).
_ALL = (
    ModelShape("llama-7b", 32, 4096, 32, 11008, 32000),
    ModelShape("llama-13b", 40, 5120, 40, 13824, 32000),
    ModelShape("llama-70b", 80, 8192, 64, 28672, 32000, 8),
    ModelShape("llama3-8b", 32, 4096, 32, 14336, 128256, 8),
    ModelShape("llama3-70b", 80, 8192, 64, 28672, 128256, 8),
    ModelShape("llama3-405b", 126, 16384, 128, 53248, 128256, 8),
    gpt("gpt3-175b", 96, 12288, 96),
    ModelShape("mixtral-8x7b", 32, 4096, 32, 14336, 32000, 8, num_experts=8, top_k=2, capacity_factor=1.0),
    ModelShape("mixtral-8x22b", 56, 6144, 48, 16384, 32768, 8, num_experts=8, top_k=2, capacity_factor=1.0),
    ModelShape(
        "deepseek-like-16b", 28, 2048, 16, 1408, 102400, num_experts=64, top_k=6, capacity_factor=1.0, shared_dim=2816
    ),
    ModelShape(
        "deepseek-v3", 61, 7168, 128, 2048, 129280, num_experts=256, top_k=8, capacity_factor=1.0, shared_dim=2048,
        kv_latent_dim=512, rope_dim=64, head_size=128, q_latent_dim=1536, dense_layers=3, dense_hidden_dim=18432,
    ),
    ModelShape("qwen3-32b", 64, 5120, 64, 25600, 151936, 8, head_size=128, qk_norm=True),
    ModelShape(
        "qwen3-30b", 48, 2048, 32, 768, 151936, 4, num_experts=128, top_k=8, capacity_factor=1.0, head_size=128,
        qk_norm=True,
    ),
    ModelShape(
        "qwen3-235b", 94, 4096, 64, 1536, 151936, 4, num_experts=128, top_k=8, capacity_factor=1.0, head_size=128,
        qk_norm=True,
    ),
    ModelShape("gpt-oss-20b", 24, 2880, 64, 2880, 201088, 8, num_experts=32, top_k=4, capacity_factor=1.0, head_size=64),
    ModelShape(
        "gpt-oss-120b", 36, 2880, 64, 2880, 201088, 8, num_experts=128, top_k=4, capacity_factor=1.0, head_size=64,
    ),
)  # fmt: skip
MODELS: dict[str, ModelShape] = {shape.name: shape for shape in _ALL}


def find_model(name: str) -> ModelShape:
    """Return a model's sizes by name, or from a .toml file. Raises ValueError, with the nearest names, if unknown."""
    return find("model", name, MODELS, ModelShape)
