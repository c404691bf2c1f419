"""The table of algorithms of each collective, and the choice that "auto" makes.

minipar's own algorithms are in ALGORITHMS. Extras of the `Kind` "algorithm" add more; each loads {collective: function}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from minipar.comm import halving_doubling, hierarchical, pairwise, ring, ring_with_root, tree
from minipar.comm.native import native
from minipar.comm.point_to_point import PointToPoint, Sizes
from minipar.comm.transport.errors import require_device
from minipar.config.choices import ALGORITHMS as CHOICES
from minipar.support.errors import one_of

ALGORITHMS: dict[str, dict[str, Callable[..., Any]]] = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "halving_doubling": halving_doubling.all_reduce,
        "doubling": halving_doubling.all_reduce_by_doubling,
        "tree": tree.all_reduce,
        "hierarchical": hierarchical.all_reduce,
    },
    "reduce": {"tree": tree.reduce, "ring": ring_with_root.reduce},
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
    "broadcast": {"tree": tree.broadcast, "ring": ring_with_root.broadcast},
    "all_to_all": {"pairwise": pairwise.all_to_all},
}

CORE = {"pairwise", *CHOICES.own}  # names of minipar's own algorithms

# Sizes of the whole vector. All but the first were measured with `minipar bench collectives`, for gloo on loopback.
SHORT_BYTES_PER_RANK = 16  # vectors of a few numbers; buckets are padded to more than this, so none is short
LONG_BYTES = 1 << 20  # from this size on, the steps of a ring cost less than the copies of halving
DOUBLING_BYTES = (
    8 << 20
)  # on 2 ranks, from this size on, the second half's step costs less than adding whole vectors
TREE_BYTES = 32 << 20  # from this size on, ring steps cost less than sending the whole vector log p times


def choose(collective: str, comm_size: int, num_bytes: int, two_levels: bool = False) -> str:
    """Return the algorithm that "auto" stands for. The arguments are equal on all ranks, so all choose the same one.

    num_bytes   bytes of the whole vector
    two_levels  whether the ranks are known to be on several nodes with several ranks each: see `hierarchical.py`

    For a vector of at least 16p bytes whose length p divides, each of p ranks sends the least possible:

        all_reduce       2(p-1)/p of it
        reduce_scatter   (p-1)/p of it, added in the same order as by all_reduce: the results are bitwise equal
        all_gather       (p-1)/p of it

    Recursive doubling has half the steps of halving_doubling: it saves log p alpha, but sends (log p - 2(p-1)/p) n more
    bytes. It is chosen only where the extra bytes cost less than the saved steps: on 2 ranks, which send no extra bytes,
    and below 16p bytes.

    In two levels, all three collectives send the same bytes, but fewer of them between nodes, and take more steps; so two
    levels are not used below 16p bytes.
    """
    power_of_two = comm_size & (comm_size - 1) == 0
    short = num_bytes < SHORT_BYTES_PER_RANK * comm_size
    if two_levels and not short and "hierarchical" in ALGORITHMS[collective]:
        return "hierarchical"
    # All-reduce and reduce-scatter add in the same order, to be bitwise equal; on 2 ranks every order gives the same bits.
    halving = "halving_doubling" if short or (power_of_two and num_bytes < LONG_BYTES) else "ring"
    if collective == "all_reduce" and comm_size == 2:
        return "doubling" if num_bytes < DOUBLING_BYTES else "halving_doubling"
    if collective == "all_reduce":
        return "doubling" if short else halving
    if collective == "reduce_scatter":
        return halving if comm_size > 2 else "ring"
    if collective == "all_gather":
        return "halving_doubling" if power_of_two else "ring"
    if collective in ("reduce", "broadcast"):
        return "tree" if num_bytes < TREE_BYTES or comm_size <= 2 else "ring"
    return "pairwise"


def require_algorithm(name: str) -> None:
    """Raise ValueError unless some collective has an algorithm of this name."""
    if name != "pairwise":
        CHOICES[name]  # raises ValueError for an unknown name


def find_algorithm(
    comm: PointToPoint,
    collective: str,
    algorithm: str,
    x: Tensor,
    sizes: Sizes = None,
    default: str | None = None,
) -> Callable[..., Any]:
    """Return the function (x, **arguments) that computes this collective on `comm`.

    default  the algorithm that "auto" stands for, where the collective has it; or None
    """
    require_device(x, comm.device, f"comm {comm.name!r}")
    if (
        algorithm == "auto"
        and default is not None
        and (default == "native" or _function(collective, default))
    ):
        algorithm = default
    if algorithm == "auto":
        num_bytes = x.nbytes
        if collective == "all_gather":  # use the result's size: inputs may differ in size between ranks
            num_bytes = sum(ring.gathered_sizes(comm, x, sizes)) * x.shape[1:].numel() * x.itemsize
        algorithm = choose(collective, comm.size, num_bytes, two_levels=comm.levels is not None)
    # Groups for "native" and "hierarchical" are made in the caller's thread, hence in the same order on every rank.
    if algorithm == "native":
        comm.process_group()
        return partial(native, comm, collective)
    if algorithm == "hierarchical":
        hierarchical.levels(comm)
    function = _function(collective, algorithm)
    if function is None:
        names = one_of([*algorithms_of(collective), "native", "auto"])
        raise ValueError(f"algorithm={algorithm!r} is none of {collective}; use {names}")
    return partial(function, comm)


def _function(collective: str, name: str) -> Callable[..., Any] | None:
    """Return the algorithm `name` of a collective, None if there is none. Extras are asked only for names not in CORE."""
    function = ALGORITHMS[collective].get(name)
    if function is None and name not in CORE:
        function = _of_extra(name).get(collective)
    return function


def _of_extra(name: str) -> dict[str, Callable[..., Any]]:
    """Return an extra's algorithms by collective; an empty dict if no extra has this name."""
    try:
        found: dict[str, Callable[..., Any]] = CHOICES[name].load()
        return found
    except ValueError:
        if name in CHOICES:  # the extra cannot be imported, or two extras have this name
            raise
        return {}


def algorithms_of(collective: str) -> list[str]:
    """Return the names of all algorithms of a collective: minipar's own, then the installed extras'."""
    extras = [name for name in CHOICES.usable() if name not in CORE and collective in _of_extra(name)]
    return [*ALGORITHMS[collective], *extras]


def require_fitting_out(out: Tensor, x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `out`, detached. Raises ValueError unless it is contiguous, not lazy, with x's dtype and this shape."""
    shape = tuple(shape)
    require_no_lazy_view(out)
    if not out.is_contiguous() or out.dtype != x.dtype or tuple(out.shape) != shape:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; use a contiguous {x.dtype} {shape}"
        )
    return out.detach()


def require_no_lazy_view(out: Tensor) -> None:
    """Raise ValueError if the values of `out` are the conjugates or negatives of what its memory holds."""
    if out.is_conj() or out.is_neg():
        raise ValueError("out is a lazy conjugate or negative; use out.resolve_conj().resolve_neg()")


def check_root(comm: PointToPoint, root: int) -> None:
    if not 0 <= root < comm.size:
        raise ValueError(f"root={root} is not a rank of {comm.name!r}; use 0 to {comm.size - 1}")
