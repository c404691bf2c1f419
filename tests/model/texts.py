"""Models whose logits differ much, and tokens for them: what the tests of generation draw."""

import torch
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.model import Transformer

HEADS = [
    dict(num_heads=2, num_kv_heads=2),
    dict(num_heads=4, num_kv_heads=2),
    dict(num_heads=4, num_kv_heads=1),
    dict(num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=True, qk_norm=True),
    dict(num_heads=4, kv_latent_dim=6, rope_dim=2),
    dict(num_heads=2, kv_latent_dim=3),
]
ROUTED_ALONE = dict(num_experts=3, top_k=2, capacity_factor=None)
ROUTED_TOGETHER = [
    dict(num_experts=3, capacity_factor=0.7),
    dict(num_experts=3, capacity_factor=0.5, group_tokens=4, drop_order="weight"),
    dict(num_experts=3, capacity_factor=1.0, router="expert_choice"),
]


def loud_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """A float64 model whose logits depend on every layer and token, and whose likeliest tokens vary."""
    model = Transformer(config, seed, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter *= 20
            elif name.endswith(".bias"):
                parameter += torch.linspace(-1, 1, len(parameter))
    return model.eval()


@st.composite
def configs(draw, experts=({}, ROUTED_ALONE), max_seq_len=12) -> ModelConfig:
    return ModelConfig(
        vocab_size=13,
        dim=16,
        num_layers=draw(st.integers(1, 3)),
        **draw(st.sampled_from(HEADS)),
        max_seq_len=max_seq_len,
        tie_embeddings=draw(st.booleans()),
        dropout=0.2,
        attention=draw(st.sampled_from(["fused", "plain", "flash"])),
        documents=draw(st.booleans()),
        moe_every=1,
        **draw(st.sampled_from(experts)),
    )


def draw_tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(13, shape, generator=torch.Generator().manual_seed(seed))
