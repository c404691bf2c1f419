"""The table of algorithms of each collective, and the choice that "auto" makes."""

from __future__ import annotations

from functools import partial

import torch

from minipar.comm import halving_doubling, hierarchical, pairwise, ring, tree
from minipar.comm.native import native
from minipar.errors import one_of

ALGORITHMS = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "halving_doubling": halving_doubling.all_reduce,
        "doubling": halving_doubling.all_reduce_by_doubling,
        "tree": tree.all_reduce,
        "hierarchical": hierarchical.all_reduce,
    },
    "reduce": {"tree": tree.reduce, "ring": ring.reduce},
    "reduce_scatter": {"ring": ring.reduce_scatter, "halving_doubling": halving_doubling.reduce_scatter},
    "all_gather": {"ring": ring.all_gather, "halving_doubling": halving_doubling.all_gather},
    "broadcast": {"tree": tree.broadcast, "ring": ring.broadcast},
    "all_to_all": {"pairwise": pairwise.all_to_all},
}

# Sizes of the whole vector above which fewer steps, or fewer additions, no longer make up for sending more bytes. Measured
# with gloo on loopback by `minipar bench collectives`.
SHORT_BYTES, LONG_BYTES = 1 << 20, 32 << 20


def choose(collective: str, comm_size: int, num_bytes: int) -> str:
    """Return the algorithm that "auto" stands for. Its arguments are equal on all ranks, so all ranks choose the same."""
    power_of_two = comm_size & (comm_size - 1) == 0
    if collective == "all_reduce":
        if num_bytes < (SHORT_BYTES if comm_size > 2 else LONG_BYTES // 4):
            return "doubling"
        return "halving_doubling" if power_of_two else "ring"
    if collective in ("reduce", "broadcast"):
        return "tree" if num_bytes < LONG_BYTES or comm_size <= 2 else "ring"
    if collective == "reduce_scatter":
        return "halving_doubling" if power_of_two and comm_size > 2 and num_bytes < SHORT_BYTES else "ring"
    if collective == "all_gather":
        return "halving_doubling" if power_of_two else "ring"
    return "pairwise"


def require_algorithm(name: str) -> None:
    """Raise ValueError unless some collective has an algorithm of this name."""
    known = {name for algorithms in ALGORITHMS.values() for name in algorithms} | {"native", "auto"}
    if name not in known:
        raise ValueError(f"algorithm={name!r} is unknown; use {one_of(sorted(known))}")


def find_algorithm(comm, collective: str, algorithm: str, x: torch.Tensor, sizes=None):
    """Return the function (x, **arguments) that computes this collective on `comm`."""
    known = ALGORITHMS[collective]
    if algorithm == "auto" and comm.default_algorithm in (*known, "native"):
        algorithm = comm.default_algorithm
    if algorithm == "auto":
        num_bytes = x.nbytes
        if collective == "all_gather":  # size of the result: inputs may differ in size between ranks
            num_bytes = sum(ring.gathered_sizes(comm, x, sizes)) * x.shape[1:].numel() * x.itemsize
        algorithm = choose(collective, comm.size, num_bytes)
    if algorithm == "native":
        comm.process_group()  # created in the caller's thread, hence in the same order on every rank
        return partial(native, comm, collective)
    if algorithm not in known:
        raise ValueError(
            f"algorithm={algorithm!r} is none of {collective}; use {one_of([*known, 'native', 'auto'])}"
        )
    return partial(known[algorithm], comm)


def require_fitting_out(out: torch.Tensor, x: torch.Tensor, length: int) -> torch.Tensor:
    """Return `out`, detached. Raises ValueError unless it is contiguous, with x's dtype and `length` rows of x's shape."""
    shape = (length, *x.shape[1:])
    if not out.is_contiguous() or out.dtype != x.dtype or tuple(out.shape) != shape:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; use a contiguous {x.dtype} {shape}"
        )
    return out.detach()


def check_root(comm, root: int) -> None:
    if not 0 <= root < comm.size:
        raise ValueError(f"root={root} is not a rank of {comm.name!r}; use 0 to {comm.size - 1}")
