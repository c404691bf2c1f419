"""What the property tests draw from, and what they mean by equal."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from minipar.config.train_config import TrainConfig

FLOATS = (torch.float64, torch.float32, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)

seeds = st.integers(0, 2**31 - 1)
dtypes = st.sampled_from(FLOATS + INTEGERS)
float_dtypes = st.sampled_from(FLOATS)
world_sizes = st.integers(1, 8)


def shapes(min_dims: int = 0, max_dims: int = 4, min_side: int = 0, max_side: int = 6):
    """Shapes, scalars and empty ones included unless ruled out."""
    return st.lists(st.integers(min_side, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def splits(draw, total: int, parts: int) -> list[int]:
    """`parts` sizes that sum to `total`; some may be 0."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total])]


@st.composite
def mesh_sizes(
    draw, max_ranks: int = 8, axes: tuple[str, ...] = ("pp", "dp", "cp", "tp", "ep")
) -> dict[str, int]:
    """Keyword arguments of a Mesh of at most `max_ranks` ranks; an axis that is not in `axes` has size 1."""
    sizes, room = {}, max_ranks
    # In drawn order: otherwise the axis that comes first would take most of the room.
    for axis in draw(st.permutations(("pp", "dp", "cp", "tp"))):
        sizes[axis] = draw(st.integers(1, room)) if axis in axes else 1
        room //= sizes[axis]
    data = sizes["dp"] * sizes["cp"]
    divisors = [d for d in range(1, data + 1) if data % d == 0]
    sizes["ep"] = draw(st.sampled_from(divisors)) if "ep" in axes else 1
    return sizes


def num_ranks(sizes: dict[str, int]) -> int:
    """How many ranks the mesh of these sizes has; ep takes its ranks from dp x cp and adds none."""
    return sizes["pp"] * sizes["dp"] * sizes["cp"] * sizes["tp"]


def assert_equal_to(
    a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-10, floor: float = 1e-14, what: str = ""
) -> None:
    """`a` is the exact `b` but for the order of additions: max|a - b| <= rtol * max|b|.

    Where the exact tensor is zero (no entry above `floor`, so there is only rounding in it), max|a - b| <=
    floor.
    """
    what = what or "tensor"
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)}, want {tuple(b.shape)}"
    assert a.dtype == b.dtype, f"{what}: dtype {a.dtype}, want {b.dtype}"
    if b.numel() == 0:
        return
    largest = b.abs().max().item()
    limit = rtol * largest if largest > floor else floor
    difference = (a - b).abs().max().item()
    # A nan is never within the limit.
    assert difference <= limit, (
        f"{what}: max|a - b| = {difference:.3e} > {limit:.3e} (max|b| = {largest:.3e})"
    )


def config_of(**values) -> TrainConfig:
    """Return a TrainConfig of values, of which a choice's are a name, or (name, options)."""
    options = {name: value[1] for name, value in values.items() if isinstance(value, tuple)}
    plain = {name: value[0] if isinstance(value, tuple) else value for name, value in values.items()}
    return TrainConfig(**plain, options={name: own for name, own in options.items() if own})
