"""One collective call, with the arguments of all its ranks, which can be run apart from the rest of the program."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.ring import gathered_sizes
from minipar.extras.dry_run.record import Refused
from minipar.extras.dry_run.tensors import DryTensors
from minipar.support.chunks import check_sizes


class Call(NamedTuple):
    """One collective call, with the arguments of all its ranks.

    size     number of ranks
    default  the algorithm that "auto" stands for, or None
    shape    the tensor's shape, without the first dim for an all-gather with given sizes: `sizes` has it
    """

    kind: str
    algorithm: str
    default: str | None
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str | None
    root: int | None
    sizes: tuple[int, ...] | None

    def __str__(self) -> str:
        op = f" {self.op}" if self.op else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind}{op} of {list(self.shape)} {dtype} over {self.size} ranks"

    def run(self, comm: Comm, tensors: DryTensors) -> None:
        """Call this collective as a rank of `comm`."""
        shape = self.shape
        given: dict[str, Any] = {}
        if self.op is not None:
            given["op"] = self.op
        if self.root is not None:
            given["root"] = self.root
        if self.kind == "all_to_all":
            assert self.sizes is not None
            given |= {"send_sizes": self.sizes, "recv_sizes": [self.sizes[comm.rank]] * comm.size}
        elif self.sizes is not None:
            given["sizes"] = self.sizes
            shape = (self.sizes[comm.rank], *shape) if self.kind == "all_gather" else shape
        x = torch.empty(shape, dtype=self.dtype)
        if not x.is_meta:
            tensors.forget_contents(x)
        comm = comm.using(self.default) if self.default else comm
        comm._collective(self.kind, self.algorithm, False, x, **given)


def call_of(comm: Comm, kind: str, algorithm: str, x: Tensor, given: dict[str, Any]) -> Call:
    """Describe a collective. Raises Refused if the other ranks' arguments do not follow from this rank's."""
    shape, sizes = tuple(x.shape), given.get("sizes")
    if kind == "all_gather" and sizes is not None:
        sizes, shape = gathered_sizes(comm, x, sizes), shape[1:]
    if kind == "all_to_all":
        sizes = check_sizes(given.get("send_sizes"), x.shape[0], comm.size, "send_sizes")
        back = given.get("recv_sizes")
        if back is not None and list(back) != [sizes[comm.rank]] * comm.size:
            raise Refused(
                f"an all-to-all on comm {comm.name!r} sends {list(sizes)} rows and receives {list(back)}: its ranks send "
                "different numbers of rows, and are not of one kind; run every rank"
            )
    return Call(
        kind,
        algorithm,
        comm.default_algorithm,
        comm.size,
        shape,
        x.dtype,
        given.get("op"),
        given.get("root"),
        None if sizes is None else tuple(int(s) for s in sizes),
    )
