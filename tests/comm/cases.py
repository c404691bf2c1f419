"""One collective call: what to draw, what each rank brings, and what it must get back, computed in one process."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from minipar.chunks import chunk_sizes
from minipar.comm import reduction
from minipar.comm.collectives import ALGORITHMS
from tests.strategies import seeds, splits

NAMES = [
    (collective, name) for collective, names in ALGORITHMS.items() for name in (*names, "native", "auto")
]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool)


class Case(NamedTuple):
    """`sizes` is None, one size a rank, or for all_to_all one row of sizes a rank."""

    collective: str
    algorithm: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str = "sum"
    root: int = 0
    sizes: list | None = None
    seed: int = 0
    strided: bool = False
    async_op: bool = False
    in_place: bool = False
    segment_bytes: int = reduction.SEGMENT_BYTES


@st.composite
def cases(draw, size: int, names=NAMES, max_rows: int = 40) -> Case:
    """A case for `size` ranks."""
    collective, algorithm = draw(st.sampled_from(names))
    dtype = draw(st.sampled_from(DTYPES[:-2] if algorithm == "native" else DTYPES))
    ops = ["max", "min"] if dtype == torch.bool else ["sum", "max", "min"]
    ops += ["mean"] if dtype.is_floating_point else []
    rest = draw(st.sampled_from([(), (1,), (3,), (2, 3), (0,)]))
    rows, sizes = draw(st.integers(0, max_rows)), None
    if collective in ("reduce_scatter", "all_gather") and draw(st.booleans()):
        sizes = draw(splits(rows, size))
    if collective == "all_to_all" and draw(st.booleans()):
        sizes = [draw(splits(rows, size)) for _ in range(size)]
    whole = collective in ("all_reduce", "reduce", "broadcast")
    return Case(
        collective,
        algorithm,
        () if whole and draw(st.integers(0, 5)) == 0 else (rows, *rest),
        dtype,
        draw(st.sampled_from(ops)),
        draw(st.integers(0, size - 1)),
        sizes,
        draw(seeds),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()) and algorithm != "native",
        draw(st.sampled_from([16, 100, reduction.SEGMENT_BYTES])),
    )


def inputs(case: Case, size: int) -> list[torch.Tensor]:
    """What each rank brings: small whole numbers, so that sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(case.seed)
    lengths = case.sizes if case.collective == "all_gather" and case.sizes else [None] * size
    shapes = [case.shape if n is None else (n, *case.shape[1:]) for n in lengths]
    low, high = (0, 2) if case.dtype == torch.bool else (-4, 5)
    return [torch.randint(low, high, shape, generator=generator).to(case.dtype) for shape in shapes]


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, each two elements from the next."""
    return torch.stack([x, x], dim=-1)[..., 0]


def reduced(case: Case, xs: list[torch.Tensor]) -> torch.Tensor:
    """The sum, mean, max or min of what the ranks bring."""
    stacked = torch.stack(xs)
    if case.op in ("sum", "mean"):
        total = stacked.sum(0, dtype=torch.float64 if case.dtype.is_floating_point else None).to(case.dtype)
        return total / len(xs) if case.op == "mean" else total
    return stacked.amax(0) if case.op == "max" else stacked.amin(0)


def expected(case: Case, xs: list[torch.Tensor], rank: int) -> torch.Tensor | None:
    """What `rank` must get back."""
    size, rows = len(xs), case.shape[0] if case.shape else 0
    match case.collective:
        case "all_reduce":
            return reduced(case, xs)
        case "reduce":
            return reduced(case, xs) if rank == case.root else None
        case "reduce_scatter":
            return reduced(case, xs).split(case.sizes or chunk_sizes(rows, size))[rank]
        case "all_gather":
            return torch.cat(xs)
        case "broadcast":
            return xs[case.root]
    return torch.cat([xs[source].split(send_sizes(case, source, size))[rank] for source in range(size)])


def send_sizes(case: Case, rank: int, size: int) -> list[int]:
    """How `rank` cuts its input of an all-to-all."""
    return case.sizes[rank] if case.sizes else chunk_sizes(case.shape[0], size)


def call(comm, case: Case, x: torch.Tensor):
    """The collective itself, with the arguments it takes."""
    options = {"algorithm": case.algorithm, "async_op": case.async_op}
    match case.collective:
        case "all_reduce" if case.in_place:
            result = comm.all_reduce_(x, case.op, **options)
        case "all_reduce":
            result = comm.all_reduce(x, case.op, **options)
        case "reduce":
            result = comm.reduce(x, case.root, case.op, **options)
        case "reduce_scatter":
            result = comm.reduce_scatter(x, case.op, case.sizes, **options)
        case "all_gather":
            result = comm.all_gather(x, case.sizes, **options)
        case "broadcast":
            result = comm.broadcast(x, case.root, **options)
        case "all_to_all":
            sizes = [send_sizes(case, r, comm.size) for r in range(comm.size)]
            received = [row[comm.rank] for row in sizes]
            result = comm.all_to_all(x, sizes[comm.rank], received, **options)
    return result.wait() if case.async_op else result


def failures(comm, cases: list[Case]) -> list[str]:
    """What is wrong with these collectives on this rank: one sentence a case, none if all is well."""
    return [f"rank {comm.rank}: {case}: {why}" for case in cases if (why := _wrong(comm, case))]


def _wrong(comm, case: Case) -> str | None:
    xs = inputs(case, comm.size)
    want = expected(case, xs, comm.rank)
    x = xs[comm.rank].clone()
    x = strided(x) if case.strided and not case.in_place else x
    usual, reduction.SEGMENT_BYTES = reduction.SEGMENT_BYTES, case.segment_bytes
    try:
        got = call(comm, case, x)
    finally:
        reduction.SEGMENT_BYTES = usual
    writes = case.collective == "all_reduce" and case.in_place
    if not writes and not torch.equal(x, xs[comm.rank]):
        return "its input was written to"
    if want is None:
        return None if got is None else "a result where there is none"
    if got.shape != want.shape or got.dtype != want.dtype or not torch.equal(got, want):
        return f"got {got}, want {want}"
    return None
