"""Collective calls to draw, in every way in which they can be made; what is right about them says minipar.spec."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch
from hypothesis import strategies as st

from minipar.comm import reduction
from minipar.comm.collectives import ALGORITHMS, algorithms_of
from minipar.spec.collectives import Call, wrong
from tests.strategies import seeds, splits

# Those of extras, too, where they are installed.
NAMES = [
    (collective, name) for collective in ALGORITHMS for name in (*algorithms_of(collective), "native", "auto")
]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool)


@dataclass(frozen=True)
class Case(Call):
    """A call of the specification, and how it is made."""

    algorithm: str = "auto"
    async_op: bool = False
    in_place: bool = False
    segment_bytes: int = reduction.SEGMENT_BYTES


def case(collective: str, algorithm: str, shape, dtype=torch.float64, **options) -> Case:
    return Case(collective, shape, dtype, algorithm=algorithm, **options)


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
        () if whole and draw(st.integers(0, 5)) == 0 else (rows, *rest),
        dtype,
        draw(st.sampled_from(ops)),
        draw(st.integers(0, size - 1)),
        sizes,
        draw(seeds),
        algorithm=algorithm,
        strided=draw(st.booleans()),
        async_op=draw(st.booleans()),
        in_place=draw(st.booleans()) and algorithm != "native",
        segment_bytes=draw(st.sampled_from([16, 100, reduction.SEGMENT_BYTES])),
    )


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, each two elements from the next."""
    return torch.stack([x, x], dim=-1)[..., 0]


def implementation(case: Case):
    """The method of Comm, called as this case has it, in the shape of the specification."""
    options = {"algorithm": case.algorithm, "async_op": case.async_op}

    def run(comm, x, *arguments):
        x = strided(x) if case.strided else x
        method = getattr(comm, case.collective)
        match case.collective:
            case "all_reduce" if case.in_place:
                result = comm.all_reduce_(x.clone(memory_format=torch.contiguous_format), case.op, **options)
            case "all_reduce":
                result = method(x, case.op, **options)
            case "reduce":
                result = method(x, case.root, case.op, **options)
            case "reduce_scatter":
                result = method(x, case.op, case.sizes, **options)
            case "all_gather":
                result = method(x, case.sizes, **options)
            case _:
                result = method(x, *arguments, **options)
        return result.wait() if case.async_op else result

    return run


def failures(comm, cases: list[Case]) -> list[str]:
    """What is wrong with these collectives on this rank: one sentence per case, none if all is well."""
    found = []
    for case in cases:
        with mock.patch.object(reduction, "SEGMENT_BYTES", case.segment_bytes):
            words = wrong(comm, implementation(case), case)
        found += [f"{case}: {words}"] if words else []
    return found
