"""The limits of context parallelism: the sequence lengths and models that it can split. Imports no torch."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import Any

from minipar.config.model_config import ModelConfig
from minipar.config.moe_config import require_whole_groups
from minipar.support.errors import divisors, one_of, require_divides, why_not_divisor

LAYOUTS = ("contiguous", "zigzag", "striped")
ATTENTIONS = ("ring", "ulysses", "all_gather", "usp")


def length_multiple(size: int, layout: str, ulysses_size: int = 1) -> int:
    """Return the number that must divide the sequence length."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; use {one_of(LAYOUTS)}")
    # zigzag gives each group two pieces, so a multiple of `size` suffices if ulysses_size is even
    return 2 * size if size > 1 and layout == "zigzag" and ulysses_size % 2 else size


def padded_length(seq_len: int, size: int, layout: str, ulysses_size: int = 1) -> int:
    """Return seq_len rounded up to a length that the layout can split."""
    multiple = length_multiple(size, layout, ulysses_size)
    return -(-seq_len // multiple) * multiple


def why_length_illegal(seq_len: int, size: int, layout: str, ulysses_size: int = 1) -> str | None:
    """Return why the layout cannot split a sequence of this length over `size` ranks; None if it can."""
    multiple = length_multiple(size, layout, ulysses_size)
    if seq_len % multiple == 0:
        return None
    return f"seq_len={seq_len} is not a multiple of {multiple}, as layout={layout!r} on {size} ranks needs"


def check_length(seq_len: int, size: int, layout: str, ulysses_size: int = 1) -> None:
    """Raise ValueError unless the layout can split a sequence of this length."""
    if why := why_length_illegal(seq_len, size, layout, ulysses_size):
        padded = padded_length(seq_len, size, layout, ulysses_size)
        raise ValueError(f"{why}; pad to {padded}, or give pad=True where a batch is split")


def why_heads_illegal(num_heads: int, size: int) -> str | None:
    """Return why Ulysses cannot split `num_heads` heads over `size` ranks without padding; None if it can."""
    return None if num_heads % size == 0 else f"{size} ranks do not divide num_heads={num_heads}"


def check_heads(num_heads: int, size: int, pad: bool = False) -> None:
    """Raise ValueError if Ulysses cannot split `num_heads` heads over `size` ranks."""
    why = None if pad else why_heads_illegal(num_heads, size)
    if why is not None:
        padded = -(-num_heads // size) * size
        raise ValueError(
            f"{why}; use {one_of(divisors(num_heads))} ranks, pad to {padded} heads, or give pad=True"
        )


def why_usp_illegal(cp: int, attention: str, ulysses_size: int) -> str | None:
    """Return why cp ranks cannot form groups of `ulysses_size` ranks that exchange heads; None if they can."""
    if attention != "usp" and ulysses_size > 1:
        return (
            f"cp_ulysses={ulysses_size} is for cp_attention=usp, not {attention}; use that, or cp_ulysses=1"
        )
    if attention == "usp" and ulysses_size == 1 and cp > 1:
        return (
            f"cp_attention=usp with cp_ulysses=1 is a ring; use cp_ulysses={one_of(divisors(cp)[1:])}, "
            "or cp_attention=ring"
        )
    if why := why_not_divisor("cp_ulysses", ulysses_size, "cp", cp):
        return f"{why}; use {one_of(divisors(cp))}"
    return None


def why_cp_illegal(
    cp: int, seq_len: int, heads: int, layout: str = "zigzag", attention: str = "ring", ulysses_size: int = 1
) -> str | None:
    """Return why cp ranks cannot split a sample of `seq_len` tokens with `heads` heads; None if they can."""
    over = ulysses_ranks(cp, attention, ulysses_size)
    return why_length_illegal(seq_len, cp, layout, ulysses_size) or why_heads_illegal(heads, over)


def ulysses_ranks(cp: int, attention: str, ulysses_size: int) -> int:
    """Return how many ranks form a Ulysses group, which exchanges heads for tokens; 1 for a ring or an all-gather."""
    return cp if attention == "ulysses" else ulysses_size if attention == "usp" else 1


def check_context_parallel(
    config: ModelConfig,
    cp: int,
    seq_len: int | None = None,
    layout: str = "zigzag",
    attention: str = "ring",
    ulysses_size: int = 1,
    tp: int = 1,
    **options: Any,
) -> None:
    """Raise ValueError, saying what would work, if a model of this config cannot be split this way. Needs no ranks.

    seq_len  tokens per sample; None: not known yet
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention={attention!r} is unknown; use {one_of(ATTENTIONS)}")
    if attention != "usp" and ulysses_size != 1:
        raise ValueError(f"ulysses_size={ulysses_size} is for attention='usp', not {attention!r}")
    require_divides("ulysses_size", ulysses_size, "cp", cp)
    length_multiple(cp, layout)  # raises if there is no such layout
    check_heads(config.num_heads // tp, ulysses_ranks(cp, attention, ulysses_size), options.get("pad", False))
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
        runs = () if seq_len is None else local_ranges(seq_len, 0, cp, layout, ulysses_size)
        works = min((len(run) if run.step == 1 else 1 for run in runs), default=1)
        raise ValueError(
            f"group_tokens=None makes a sequence one routing group, which cp={cp} would cut; use group_tokens={works}"
        )
    why = None if seq_len is None else why_groups_cut(seq_len, config.group_tokens, cp, layout, ulysses_size)
    if why is not None:
        raise ValueError(why)


@lru_cache(maxsize=256)  # the planner asks for many layouts with the same cp
def why_groups_cut(
    seq_len: int, group_tokens: int, cp: int, layout: str = "zigzag", ulysses_size: int = 1
) -> str | None:
    """Return why cp would cut a routing group of `group_tokens` positions; None if it cuts none."""
    for rank in range(cp):
        runs = local_ranges(seq_len, rank, cp, layout, ulysses_size)
        try:
            require_whole_groups(list(chain(*runs)), group_tokens)
        except ValueError as error:
            return str(error)
    return None


def local_ranges(seq_len: int, rank: int, size: int, layout: str, ulysses_size: int = 1) -> tuple[range, ...]:
    """Return the tokens of `rank`, in the order in which it holds them.

    ulysses_size  above 1: the layout splits the sequence over groups of this many neighbouring ranks, and each rank has a
                  contiguous piece of its group's tokens

    Raises ValueError if the layout is unknown, or if it cannot split seq_len; the message says what length to pad to.
    """
    check_length(seq_len, size, layout, ulysses_size)
    (group, place), groups = divmod(rank, ulysses_size), size // ulysses_size
    own = seq_len // groups
    if groups == 1:
        runs = [range(seq_len)]
    elif layout == "contiguous":
        runs = [range(group * own, (group + 1) * own)]
    elif layout == "striped":
        runs = [range(group, seq_len, groups)]
    else:
        half = own // 2
        runs = [range(start * half, (start + 1) * half) for start in (group, 2 * groups - 1 - group)]
    piece = own // ulysses_size
    return _cut(runs, place * piece, (place + 1) * piece) if ulysses_size > 1 else tuple(runs)


def _cut(runs: list[range], start: int, stop: int) -> tuple[range, ...]:
    """Return the elements start to stop - 1 of the concatenated runs."""
    cut, before = [], 0
    for run in runs:
        cut.append(run[max(0, start - before) : max(0, stop - before)])
        before += len(run)
    return tuple(part for part in cut if part)
