"""The collectives as methods of a Comm: which algorithms there are for each, and which one `auto` takes."""

from __future__ import annotations

import copy
from functools import partial

import torch

from minipar.comm import halving_doubling, hierarchical, pairwise, ring, tree
from minipar.comm.chunks import check_sizes
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

# Where fewer steps, or fewer additions, stop being worth more bytes; of the whole vector. Measured with gloo on loopback by
# `minipar bench collectives`.
SHORT_BYTES, LONG_BYTES = 1 << 20, 32 << 20


def choose(collective: str, comm_size: int, num_bytes: int) -> str:
    """What `auto` stands for: a function of nothing but what is equal on every rank."""
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


class Collectives:
    """Every method is pure (its input is not written to) and the same call on every rank of the Comm.

    algorithm   a name of ALGORITHMS, "native" for torch's own, or "auto"
    async_op    return a handle at once, whose `wait()` gives the result; the input must not change before that

    Gather and scatter act on dim 0. Costs are in the modules of the algorithms.
    """

    preferred: str | None = None

    def using(self, algorithm: str):
        """This same Comm, with "auto" standing for `algorithm` in every collective that has it; "auto" undoes it."""
        known = {name for algorithms in ALGORITHMS.values() for name in algorithms} | {"native", "auto"}
        if algorithm not in known:
            raise ValueError(f"algorithm={algorithm!r} is unknown; use {one_of(sorted(known))}")
        other = copy.copy(self)
        other.preferred = None if algorithm == "auto" else algorithm
        return other

    def all_reduce(self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto", async_op: bool = False):
        """The sum (mean, max, min) over ranks of x, on every rank."""
        return self._call("all_reduce", algorithm, async_op, x, op=op)

    def all_reduce_(self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto", async_op: bool = False):
        """The same, written into x, which must be contiguous."""
        if not x.is_contiguous():
            raise ValueError(
                f"all_reduce_ needs a contiguous tensor, not strides {x.stride()} for shape {tuple(x.shape)}"
            )
        return self._call("all_reduce", algorithm, async_op, x, op=op, out=x.detach())

    def reduce(self, x, root: int = 0, op: str = "sum", algorithm: str = "auto", async_op: bool = False):
        """The sum over ranks of x on rank `root`; None elsewhere."""
        self._check_root(root)
        return self._call("reduce", algorithm, async_op, x, root=root, op=op)

    def reduce_scatter(
        self, x, op: str = "sum", sizes=None, algorithm: str = "auto", async_op: bool = False, out=None
    ):
        """This rank's chunk, along dim 0, of the sum over ranks of x. `sizes`: every rank's, else as torch.chunk cuts.

        `out`, contiguous, is where to put it, if not into a new tensor: that chunk of x itself will do.
        """
        if out is not None:
            out = _place(out, x, check_sizes(sizes, x.shape[0], self.size, "sizes")[self.rank])
        return self._call("reduce_scatter", algorithm, async_op, x, op=op, sizes=sizes, out=out)

    def all_gather(self, x, sizes=None, algorithm: str = "auto", async_op: bool = False, out=None):
        """All ranks' x along dim 0. `sizes`: every rank's length, where they differ.

        `out`, contiguous, is where to put it, if not into a new tensor; x may be this rank's chunk of it.
        """
        if out is not None:
            out = _place(out, x, sum(ring.gathered_sizes(self, x, sizes)))
        return self._call("all_gather", algorithm, async_op, x, sizes=sizes, out=out)

    def broadcast(self, x, root: int = 0, algorithm: str = "auto", async_op: bool = False):
        """Rank `root`'s x; the others' has the same shape and dtype and is not read."""
        self._check_root(root)
        return self._call("broadcast", algorithm, async_op, x, root=root)

    def all_to_all(
        self, x, send_sizes=None, recv_sizes=None, algorithm: str = "auto", async_op: bool = False
    ):
        """Chunk s of x, along dim 0, goes to rank s; what rank s sent here is chunk s of the result."""
        return self._call("all_to_all", algorithm, async_op, x, send_sizes=send_sizes, recv_sizes=recv_sizes)

    def custom(self, kind: str, operation, async_op: bool = False):
        """A collective of the caller's own: `operation()`, made of sends, receives and exchanges on this Comm.

        It is one operation of the stream, booked and traced under `kind`; what it returns is the result.
        """
        return self._collective(kind, operation, async_op)

    def barrier(self) -> None:
        """Return when every rank has called it: ceil(log p) steps of one byte (the dissemination barrier)."""
        self._collective("barrier", self._disseminate, async_op=False)

    def _disseminate(self) -> None:
        token, distance = torch.zeros(1, dtype=torch.uint8, device=self.device), 1
        while distance < self.size:
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self.exchange(token, to, token.shape, token.dtype, source)
            distance *= 2
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _call(self, collective: str, algorithm: str, async_op: bool, x: torch.Tensor, **kwargs):
        known = ALGORITHMS[collective]
        if x.dim() == 0 and collective in ("reduce_scatter", "all_gather", "all_to_all"):
            raise ValueError(f"{collective} acts on dim 0, and x has none: use x.view(1)")
        if algorithm == "auto" and self.preferred in (*known, "native"):
            algorithm = self.preferred
        if algorithm == "auto":
            num_bytes = x.nbytes
            if collective == "all_gather":  # of the whole: what one rank brings may be another's nothing
                num_bytes = (
                    sum(ring.gathered_sizes(self, x, kwargs["sizes"])) * x.shape[1:].numel() * x.itemsize
                )
            algorithm = choose(collective, self.size, num_bytes)
        if algorithm == "native":
            self.process_group()  # made in the caller's thread, so in the same order on every rank
            function = partial(self._native, collective)
        elif algorithm in known:
            function = partial(known[algorithm], self)
        else:
            raise ValueError(
                f"algorithm={algorithm!r} is none of {collective}; use {one_of([*known, 'native', 'auto'])}"
            )
        return self._collective(collective, partial(function, x, **kwargs), async_op)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"root={root} is not a rank of {self.name!r}; use 0 to {self.size - 1}")


def _place(out: torch.Tensor, x: torch.Tensor, length: int) -> torch.Tensor:
    """`out`, fit to be written to; ValueError where the result would not fit."""
    shape = (length, *x.shape[1:])
    if not out.is_contiguous() or out.dtype != x.dtype or tuple(out.shape) != shape:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; use a contiguous {x.dtype} {shape}"
        )
    return out.detach()
