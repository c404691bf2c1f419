"""A small trained model and text that it has not seen: what the tests of rounding measure a loss on."""

import functools

import torch

from minipar.config.model_config import ModelConfig
from minipar.model import Transformer
from minipar.train.data.text import load_text

CONFIG = ModelConfig(vocab_size=256, dim=64, num_layers=2, num_heads=2, hidden_dim=192, max_seq_len=64)
SEQ_LEN, BATCH, STEPS, HELD_OUT = 64, 16, 150, 32


@functools.lru_cache
def trained_model() -> Transformer:
    model, text = Transformer(CONFIG, dtype=torch.float32), _windows()[HELD_OUT:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        samples = text[torch.randint(len(text), (BATCH,), generator=draw)]
        optimizer.zero_grad()
        model.loss(samples[:, :-1], samples[:, 1:]).backward()
        optimizer.step()
    return model.eval()


def held_out() -> torch.Tensor:
    """Samples that the model has not been trained on, with the token after each: [HELD_OUT, SEQ_LEN + 1]."""
    return _windows()[:HELD_OUT]


@torch.no_grad()
def held_out_loss(model: Transformer) -> float:
    return float(model.loss(held_out()[:, :-1], held_out()[:, 1:]))


@torch.no_grad()
def held_out_logits(model: Transformer) -> torch.Tensor:
    return model(held_out()[:, :-1])


def divergence(whole: torch.Tensor, other: torch.Tensor) -> float:
    """The mean over tokens of KL(p || q): p is the distribution by the whole model's logits, q by the other's."""
    p, q = (logits.double().log_softmax(-1) for logits in (whole, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def _windows() -> torch.Tensor:
    text = load_text(None)
    return text[: len(text) // (SEQ_LEN + 1) * (SEQ_LEN + 1)].long().view(-1, SEQ_LEN + 1)
