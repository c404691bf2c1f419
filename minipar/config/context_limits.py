"""The tokens of each context-parallel rank, and the lengths and heads that can be split. Imports no torch."""

from __future__ import annotations

from minipar.support.errors import divisors, one_of

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


def check_length(seq_len: int, size: int, layout: str, ulysses_size: int = 1) -> None:
    """Raise ValueError unless the layout can split a sequence of this length."""
    multiple = length_multiple(size, layout, ulysses_size)
    if seq_len % multiple:
        raise ValueError(
            f"seq_len={seq_len} is not a multiple of {multiple}, as layout={layout!r} on {size} ranks needs; pad to "
            f"{padded_length(seq_len, size, layout, ulysses_size)}, or give pad=True where a batch is split"
        )


def check_heads(num_heads: int, size: int, pad: bool = False) -> None:
    """Raise ValueError if Ulysses cannot split `num_heads` heads over `size` ranks."""
    if num_heads % size and not pad:
        raise ValueError(
            f"{size} ranks do not divide num_heads={num_heads}; use {one_of(divisors(num_heads))} ranks, pad to "
            f"{-(-num_heads // size) * size} heads, or give pad=True"
        )


def ulysses_ranks(cp: int, attention: str, ulysses_size: int) -> int:
    """Return how many ranks form a Ulysses group, which exchanges heads for tokens; 1 for a ring or an all-gather."""
    return cp if attention == "ulysses" else ulysses_size if attention == "usp" else 1


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
