"""The tp sizes, and the grids of ranks, over which a model can be split, from its config alone. Imports no torch."""

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


def grid_shape(tp: int, layout: str, depth: int = 1) -> tuple[int, int]:
    """Return (rows, columns) of tp ranks: rows hold different samples, columns different features.

    2d         q x q        rows q, columns q        2.5d   d x q x q     rows d q, columns q
    3d         p x p x p    rows p^2, columns p

    Raises ValueError, naming the sizes that work, where tp ranks are no such grid.
    """
    times, power = (1, 3) if layout == "3d" else (depth, 2)
    side = round((tp / times) ** (1 / power))
    if times * side**power != tp:
        what = {"2d": "a square", "2.5d": f"tp_depth={depth} times a square", "3d": "a cube"}[layout]
        sizes = one_of(times * n**power for n in range(1, 5))
        raise ValueError(f"tp={tp} with tp_layout={layout} is not {what}; use tp={sizes}, or tp_layout=1d")
    return tp // side, side


def check_grid(config: ModelConfig, tp: int, layout: str, depth: int = 1) -> None:
    """Raise ValueError where a model of this config cannot be split evenly over tp ranks in a layout of `grid_shape`."""
    _, side = grid_shape(tp, layout, depth)
    if config.num_experts:
        raise ValueError(
            f"tp_layout={layout} has no cut for num_experts={config.num_experts}; use tp_layout=1d"
        )
    rows = side**2 if layout == "3d" else side  # of a matrix: on a cube, a part of its rows is cut once more
    key_dim = config.num_kv_heads * config.head_dim
    for name, size, parts in (
        ("num_heads", config.num_heads, side),
        ("num_kv_heads", config.num_kv_heads, side),
        ("num_kv_heads * head_dim", key_dim, rows),
        ("dim", config.dim, rows),
        ("hidden_dim", config.hidden_dim, rows),
        ("vocab_size", config.vocab_size, rows),
    ):
        if size % parts:
            raise ValueError(
                f"tp={tp} with tp_layout={layout} cuts {name}={size} into {parts} equal parts; use a multiple of "
                f"{parts}, or tp_layout=1d"
            )
