"""The table of algorithms of each collective, and the choice that "auto" makes."""

from __future__ import annotations

from functools import partial

import torch

from minipar.comm import bruck, double_tree, halving_doubling, hierarchical, pairwise, ring, tree
from minipar.comm.messages import require_device
from minipar.comm.native import native
from minipar.errors import one_of

ALGORITHMS = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "halving_doubling": halving_doubling.all_reduce,
        "doubling": halving_doubling.all_reduce_by_doubling,
        "tree": tree.all_reduce,
        "double_tree": double_tree.all_reduce,
        "hierarchical": hierarchical.all_reduce,
    },
    "reduce": {"tree": tree.reduce, "ring": ring.reduce},
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "halving_doubling": halving_doubling.reduce_scatter,
        "hierarchical": hierarchical.reduce_scatter,
    },
    "all_gather": {
        "ring": ring.all_gather,
        "halving_doubling": halving_doubling.all_gather,
        "hierarchical": hierarchical.all_gather,
    },
    "broadcast": {"tree": tree.broadcast, "ring": ring.broadcast},
    "all_to_all": {"pairwise": pairwise.all_to_all, "bruck": bruck.all_to_all},
}

# Of the whole vector. The two long ones were measured with gloo on loopback, by `minipar bench collectives`.
SHORT_BYTES_PER_RANK = 16  # a few numbers; buckets are padded to more, so that none of them is short
LONG_BYTES = 1 << 20  # from here on the steps of a ring cost less than the copies of halving
TREE_BYTES = 32 << 20  # from here on they cost less than sending the whole vector log p times


def choose(collective: str, comm_size: int, num_bytes: int, two_levels: bool = False) -> str:
    """Return the algorithm that "auto" stands for. Its arguments are equal on all ranks, so all ranks choose the same.

    num_bytes   of the whole vector
    two_levels  whether it is known that the ranks are on several nodes, several on each: see `hierarchical.py`

    On p ranks, of a vector of at least 16p bytes whose length p divides, a rank sends the least there is:

        all_reduce       2(p-1)/p of it
        reduce_scatter   (p-1)/p of it, added in the same order as by all_reduce: the results are bitwise equal
        all_gather       (p-1)/p of it

    Recursive doubling has half the steps of halving_doubling: it saves log p alpha, and sends (log p - 2(p-1)/p) n bytes
    more. It is chosen only where these cost less: on 2 ranks, where they are none, and below 16p bytes.

    In two levels all three send as much, but less of it between nodes; below 16p bytes, they have more steps.
    """
    power_of_two = comm_size & (comm_size - 1) == 0
    short = num_bytes < SHORT_BYTES_PER_RANK * comm_size
    if two_levels and not short and "hierarchical" in ALGORITHMS[collective]:
        return "hierarchical"
    halving = short or (power_of_two and num_bytes < LONG_BYTES)  # for both: they must add in one order
    if collective == "all_reduce":
        if short or (comm_size == 2 and num_bytes < 8 * LONG_BYTES):
            return "doubling"
        return "halving_doubling" if halving or comm_size == 2 else "ring"
    if collective == "reduce_scatter":
        return "halving_doubling" if halving and comm_size > 2 else "ring"
    if collective == "all_gather":
        return "halving_doubling" if power_of_two else "ring"
    if collective in ("reduce", "broadcast"):
        return "tree" if num_bytes < TREE_BYTES or comm_size <= 2 else "ring"
    return "pairwise"


def require_algorithm(name: str) -> None:
    """Raise ValueError unless some collective has an algorithm of this name."""
    known = {name for algorithms in ALGORITHMS.values() for name in algorithms} | {"native", "auto"}
    if name not in known:
        raise ValueError(f"algorithm={name!r} is unknown; use {one_of(sorted(known))}")


def find_algorithm(comm, collective: str, algorithm: str, x: torch.Tensor, sizes=None):
    """Return the function (x, **arguments) that computes this collective on `comm`."""
    require_device(x, comm.device, f"comm {comm.name!r}")
    known = ALGORITHMS[collective]
    if algorithm == "auto" and comm.default_algorithm in (*known, "native"):
        algorithm = comm.default_algorithm
    if algorithm == "auto":
        num_bytes = x.nbytes
        if collective == "all_gather":  # size of the result: inputs may differ in size between ranks
            num_bytes = sum(ring.gathered_sizes(comm, x, sizes)) * x.shape[1:].numel() * x.itemsize
        algorithm = choose(collective, comm.size, num_bytes, two_levels=comm.levels is not None)
    # What these need is made in the caller's thread, hence in the same order on every rank.
    if algorithm == "native":
        comm.process_group()
        return partial(native, comm, collective)
    if algorithm not in known:
        raise ValueError(
            f"algorithm={algorithm!r} is none of {collective}; use {one_of([*known, 'native', 'auto'])}"
        )
    if algorithm == "hierarchical":
        hierarchical.levels(comm)
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
