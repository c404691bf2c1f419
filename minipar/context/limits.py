"""The sequence lengths and models that context parallelism can split, from their sizes alone. Imports no torch."""

from __future__ import annotations

from minipar.errors import divisors, one_of, require_divides
from minipar.model.model_config import ModelConfig
from minipar.model.moe_config import require_whole_groups

LAYOUTS = ("contiguous", "zigzag", "striped")
ATTENTIONS = ("ring", "ulysses", "all_gather", "usp")


def length_multiple(size: int, layout: str, ulysses_size: int = 1) -> int:
    """Return the number that must divide the length of a sequence."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; use {one_of(LAYOUTS)}")
    # zigzag gives each group of ulysses_size ranks two pieces; where that is even, multiples of `size` already allow it
    return 2 * size if layout == "zigzag" and ulysses_size % 2 else size


def padded_length(seq_len: int, size: int, layout: str, ulysses_size: int = 1) -> int:
    """Return seq_len rounded up to a length that the layout can split."""
    multiple = length_multiple(size, layout, ulysses_size)
    return -(-seq_len // multiple) * multiple


def check_length(seq_len: int, size: int, layout: str, ulysses_size: int = 1) -> None:
    """Raise ValueError unless the layout can split a sequence of this length."""
    padded = padded_length(seq_len, size, layout, ulysses_size)
    if padded != seq_len:
        raise ValueError(
            f"seq_len={seq_len} is not a multiple of {length_multiple(size, layout, ulysses_size)}, as "
            f"layout={layout!r} on {size} ranks needs; pad to {padded}, or give pad=True where a batch is split"
        )


def check_heads(num_heads: int, size: int, pad: bool = False) -> None:
    """Raise ValueError where Ulysses cannot split num_heads over `size` ranks."""
    if num_heads % size and not pad:
        padded = -(-num_heads // size) * size
        raise ValueError(
            f"{size} ranks do not divide num_heads={num_heads}; use {one_of(divisors(num_heads))} ranks, pad to "
            f"{padded} heads, or give pad=True"
        )


def check_context_parallel(
    config: ModelConfig,
    cp: int,
    seq_len: int | None = None,
    layout: str = "zigzag",
    attention: str = "ring",
    ulysses_size: int = 1,
    tp: int = 1,
    **options,
) -> None:
    """Raise ValueError, saying what would work, where a model of this config cannot be split this way; needs no ranks.

    seq_len  tokens per sample; None: not known yet
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention={attention!r} is unknown; use {one_of(ATTENTIONS)}")
    if attention != "usp" and ulysses_size != 1:
        raise ValueError(f"ulysses_size={ulysses_size} is for attention='usp', not {attention!r}")
    require_divides("ulysses_size", ulysses_size, "cp", cp)
    check_length(0, cp, layout)  # raises if there is no such layout
    if attention in ("ulysses", "usp"):
        over = cp if attention == "ulysses" else ulysses_size
        check_heads(config.num_heads // tp, over, options.get("pad", False))
    if attention == "all_gather":
        kv_heads = max(1, config.num_kv_heads // tp)
        require_divides(
            "heads_at_once", options.get("heads_at_once") or kv_heads, "key/value heads", kv_heads
        )
    if seq_len is not None:
        check_length(seq_len, cp, layout, ulysses_size)
    if config.num_experts and cp > 1:
        _check_groups(config, cp, seq_len, layout, ulysses_size)


def _check_groups(config: ModelConfig, cp: int, seq_len: int | None, layout: str, ulysses_size: int) -> None:
    if config.group_tokens is None:
        raise ValueError(
            f"group_tokens=None makes the whole sequence one routing group, which cp={cp} would cut; give group_tokens"
        )
    if seq_len is None:
        return
    for rank in range(cp):
        positions = local_positions_list(seq_len, rank, cp, layout, ulysses_size)
        require_whole_groups(positions, config.group_tokens)


def local_positions_list(seq_len: int, rank: int, size: int, layout: str, ulysses_size: int = 1) -> list[int]:
    """Return `token_layout.local_positions` as a list, without torch."""
    group, groups = rank // ulysses_size, size // ulysses_size
    own = seq_len // groups
    if layout == "contiguous":
        positions = list(range(group * own, (group + 1) * own))
    elif layout == "striped":
        positions = list(range(group, seq_len, groups))
    else:
        half = own // 2
        starts = group * half, (2 * groups - 1 - group) * half
        positions = [start + i for start in starts for i in range(half)]
    piece = len(positions) // ulysses_size
    return positions[rank % ulysses_size * piece :][:piece]
