"""The grids of ranks over which a model can be split, given its config. Imports no torch."""

from __future__ import annotations

from minipar.config.model_config import ModelConfig
from minipar.support.errors import one_of


def grid_shape(tp: int, layout: str, depth: int = 1) -> tuple[int, int]:
    """Return the numbers of rows and columns in which tp ranks are arranged.

    Each row of ranks holds different samples, and each column holds different features.

    2d         q x q        rows q, columns q        2.5d   d x q x q     rows d q, columns q
    3d         p x p x p    rows p^2, columns p

    Raises ValueError, which names the sizes that work, if tp ranks cannot form the grid.
    """
    times, power = (1, 3) if layout == "3d" else (depth, 2)
    side = round((tp / times) ** (1 / power))
    if times * side**power != tp:
        what = {"2d": "a square", "2.5d": f"tp_layout.depth={depth} times a square", "3d": "a cube"}[layout]
        sizes = one_of(times * n**power for n in range(1, 5))
        raise ValueError(f"tp={tp} with tp_layout={layout} is not {what}; use tp={sizes}, or tp_layout=1d")
    return tp // side, side


def check_grid(config: ModelConfig, tp: int, layout: str, depth: int = 1) -> None:
    """Raise ValueError if a model of this config cannot be split evenly over tp ranks in a layout of `grid_shape`."""
    _, side = grid_shape(tp, layout, depth)
    for name in ("num_experts", "kv_latent_dim", "qkv_bias", "qk_norm"):
        if found := getattr(config, name):
            raise ValueError(f"tp_layout={layout} has no cut for {name}={found}; use tp_layout=1d")
    # The number of parts into which a matrix's rows are cut: a cube cuts them twice.
    rows = side**2 if layout == "3d" else side
    for name, size, parts in (
        ("num_heads", config.num_heads, side),
        ("num_kv_heads", config.num_kv_heads, side),
        ("num_heads * head_dim", config.num_heads * config.head_dim, rows),
        ("num_kv_heads * head_dim", config.num_kv_heads * config.head_dim, rows),
        ("dim", config.dim, rows),
        ("hidden_dim", config.hidden_dim, rows),
        ("vocab_size", config.vocab_size, rows),
    ):
        if size % parts:
            raise ValueError(
                f"tp={tp} with tp_layout={layout} cuts {name}={size} into {parts} equal parts; use a multiple of "
                f"{parts}, or tp_layout=1d"
            )
