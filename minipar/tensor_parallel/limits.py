"""The tp sizes over which a model can be split, from its config alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from minipar.chunks import chunk_sizes
from minipar.errors import divisors, one_of
from minipar.model.model_config import ModelConfig


def check_tensor_parallel(config: ModelConfig, tp: int, pad_vocab: bool = False) -> None:
    """Raise ValueError, naming the tp sizes that work, where a model of this config cannot be split over tp ranks."""
    legal = legal_sizes(config, pad_vocab)
    if tp in legal:
        return
    advice = f"use {one_of(legal)}"
    if not pad_vocab and tp in legal_sizes(config, pad_vocab=True):
        advice += ", or pad_vocab=True"
    raise ValueError(f"tp={tp} {next(_obstacles(config, tp, pad_vocab))}; {advice}")


def legal_sizes(config: ModelConfig, pad_vocab: bool = False) -> list[int]:
    """Return the tp sizes over which a model of this config can be split, ascending."""
    return [tp for tp in divisors(config.num_heads) if not any(_obstacles(config, tp, pad_vocab))]


def _obstacles(config: ModelConfig, tp: int, pad_vocab: bool) -> Iterator[str]:
    sizes = {"num_heads": config.num_heads, "hidden_dim": config.hidden_dim}
    if config.num_experts and config.shared_dim:
        sizes["shared_dim"] = config.shared_dim
    if not pad_vocab:
        sizes["vocab_size"] = config.vocab_size
    for name, size in sizes.items():
        if tp < 1 or size % tp:
            yield f"does not divide {name}={size}"
    kv = config.num_kv_heads
    if tp >= 1 and tp % kv and kv % tp:
        yield f"neither divides num_kv_heads={kv} nor is a multiple of it"
    if pad_vocab and tp >= 1 and 0 in chunk_sizes(config.vocab_size, tp):
        yield f"leaves a rank without a row of vocab_size={config.vocab_size}"
