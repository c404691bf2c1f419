"""The tp sizes over which a model can be split, decided from its dimensions alone. Imports no torch."""

from __future__ import annotations

from minipar.config.model_config import ModelConfig
from minipar.support.chunks import chunk_sizes
from minipar.support.errors import divisors, one_of, why_not_divisor


def check_tensor_parallel(config: ModelConfig, tp: int, pad_vocab: bool = False) -> None:
    """Raise ValueError, naming the tp sizes that work, if a model of this config cannot be split over tp ranks."""
    why = _why_of(config, tp, pad_vocab)
    if why is None:
        return
    advice = f"use {one_of(legal_sizes(config, pad_vocab))}"
    if not pad_vocab and _why_of(config, tp, pad_vocab=True) is None:
        advice += ", or pad_vocab=True"
    raise ValueError(f"{why}; {advice}")


def legal_sizes(config: ModelConfig, pad_vocab: bool = False) -> list[int]:
    """Return the tp sizes over which a model of this config can be split, ascending."""
    return [tp for tp in divisors(config.num_heads) if _why_of(config, tp, pad_vocab) is None]


def _why_of(config: ModelConfig, tp: int, pad_vocab: bool) -> str | None:
    heads = config.num_heads, config.num_kv_heads
    shared_dim = config.shared_dim if config.num_experts else 0
    return why_tp_illegal(tp, *heads, config.hidden_dim, config.vocab_size, shared_dim, pad_vocab)


def why_tp_illegal(
    tp: int,
    num_heads: int,
    num_kv_heads: int,
    hidden_dim: int,
    vocab_size: int,
    shared_dim: int = 0,
    pad_vocab: bool = False,
) -> str | None:
    """Return why a model of these sizes cannot be split over tp ranks; None if it can.

    shared_dim  width of the expert that every token uses; 0: there is none
    pad_vocab   the last rank may have fewer rows of the vocabulary than the other ranks
    """
    why = (
        why_not_divisor("tp", tp, "num_heads", num_heads)
        or why_not_divisor("tp", tp, "hidden_dim", hidden_dim)
        or why_not_divisor("tp", tp, "shared_dim", shared_dim)
    )
    if why is not None:
        return why
    if tp % num_kv_heads and num_kv_heads % tp:
        return f"tp={tp} neither divides num_kv_heads={num_kv_heads} nor is a multiple of it"
    if not pad_vocab:
        return why_not_divisor("tp", tp, "vocab_size", vocab_size)
    if 0 in chunk_sizes(vocab_size, tp):
        return f"tp={tp} leaves a rank without a row of vocab_size={vocab_size}"
    return None


def why_tokens_uneven(tp: int, tokens: int) -> str | None:
    """Return why sequence parallelism cannot divide a rank's tokens of a sample over tp ranks; None if it can."""
    return why_not_divisor("tp", tp, "a rank's tokens of a sample (seq_len/cp)", tokens)
