"""Comm: a rank's membership in a group of ranks, with point-to-point messages and collectives as methods."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # public torch.compiler.disable would import Dynamo here

from minipar.comm import hierarchical
from minipar.comm.barrier import dissemination_barrier
from minipar.comm.collectives import (
    check_root,
    find_algorithm,
    require_algorithm,
    require_fitting_out,
    require_no_lazy_view,
)
from minipar.comm.point_to_point import PointToPoint, Sizes
from minipar.comm.ring import gathered_sizes
from minipar.comm.transport.existing_group import transport_on
from minipar.comm.transport.transport import Transport
from minipar.support.chunks import check_sizes


class Comm(PointToPoint):
    """One rank's membership in a group of ranks, passed explicitly. Its attributes are those of `PointToPoint`.

    All ranks of the Comm must call its collectives in the same order. None writes to its input, except `all_reduce_`.

    algorithm    a name of `collectives.ALGORITHMS`, an extra's, "native" for torch's own, or "auto"
    async_op     return a handle at once, whose `wait()` returns the result; x must not change before that

    Gather and scatter act on dim 0. The modules of the algorithms state their costs.
    """

    def __init__(
        self, transport: Transport, ranks: tuple[int, ...], name: str, parent: PointToPoint | None = None
    ):
        super().__init__(transport, ranks, name, parent)
        self.default_algorithm: str | None = parent.default_algorithm if isinstance(parent, Comm) else None
        # Make the level Comms now: on NCCL one thread must make all Comms, and a gradient hook runs in another thread.
        if self.node_size is not None:
            self.levels = hierarchical.levels(self, self.node_size)

    @classmethod
    def from_process_group(
        cls, group: Any = None, timeout_s: float = 60.0, node_size: int | None = None
    ) -> Comm:
        """Make a world on a process group that the caller has initialised (None: the default group).

        Two worlds on one group never receive each other's messages. All ranks must make them in the same order.
        A collective of algorithm "native" gives the group this timeout, also for its other users.
        """
        transport = transport_on(group, timeout_s, node_size)
        return cls(transport, transport.ranks, "world")

    @property
    def node_size(self) -> int | None:
        """Ranks of this group per node; None if unknown or not useful for two levels: see `hierarchical.ranks_per_node`."""
        return hierarchical.ranks_per_node(self.ranks, self._transport.node_size)

    def using(self, algorithm: str) -> Comm:
        """Return this Comm, but with "auto" meaning `algorithm` in every collective that has it; "auto" undoes this."""
        require_algorithm(algorithm)
        other = copy.copy(self)
        other.default_algorithm = None if algorithm == "auto" else algorithm
        return other

    def report(self, value: object) -> None:
        """Pass a value to the `on_report` callback of `minipar.run`; outside a local pool, do nothing."""
        if self._transport.report is not None:
            self._transport.report(value)

    def ask(self, value: object) -> Any:
        """Return the answer of `minipar.run`'s `on_ask` callback to a value. Raises RuntimeError outside a local pool."""
        if self._transport.ask is None:
            raise RuntimeError("ask was called outside minipar.run, where nobody answers")
        return self._transport.ask(value)

    def all_reduce(self, x: Tensor, op: str = "sum", algorithm: str = "auto", async_op: bool = False) -> Any:
        """Return the sum (mean, max or min) over ranks of x, on every rank."""
        return self._collective("all_reduce", algorithm, async_op, x, op=op)

    def all_reduce_(self, x: Tensor, op: str = "sum", algorithm: str = "auto", async_op: bool = False) -> Any:
        """All-reduce in place: the result is written into x, which must be contiguous."""
        require_no_lazy_view(x)
        if not x.is_contiguous():
            raise ValueError(f"all_reduce_ needs a contiguous tensor, and x has the strides {x.stride()}")
        return self._collective("all_reduce", algorithm, async_op, x, op=op, out=x.detach())

    def reduce(
        self, x: Tensor, root: int = 0, op: str = "sum", algorithm: str = "auto", async_op: bool = False
    ) -> Any:
        """Return the sum (mean, max or min) over ranks of x on rank `root`, None on the other ranks."""
        check_root(self, root)
        return self._collective("reduce", algorithm, async_op, x, root=root, op=op)

    def reduce_scatter(
        self,
        x: Tensor,
        op: str = "sum",
        sizes: Sizes = None,
        algorithm: str = "auto",
        async_op: bool = False,
        out: Tensor | None = None,
    ) -> Any:
        """Return this rank's chunk, along dim 0, of the sum over ranks of x.

        sizes   chunk length of each rank; None: the lengths that torch.chunk gives
        out     None, or a contiguous tensor for the result; it may be this rank's chunk of x
        """
        if out is not None:
            length = check_sizes(sizes, x.shape[0], self.size, "sizes")[self.rank]
            out = require_fitting_out(out, x, (length, *x.shape[1:]))
        return self._collective("reduce_scatter", algorithm, async_op, x, op=op, sizes=sizes, out=out)

    def all_gather(
        self,
        x: Tensor,
        sizes: Sizes = None,
        algorithm: str = "auto",
        async_op: bool = False,
        out: Tensor | None = None,
    ) -> Any:
        """Concatenate all ranks' x along dim 0.

        sizes   length of each rank's x; None: all equal
        out     None, or a contiguous tensor for the result; x may be this rank's chunk of it
        """
        if out is not None:
            out = require_fitting_out(out, x, (sum(gathered_sizes(self, x, sizes)), *x.shape[1:]))
        return self._collective("all_gather", algorithm, async_op, x, sizes=sizes, out=out)

    def broadcast(
        self,
        x: Tensor,
        root: int = 0,
        algorithm: str = "auto",
        async_op: bool = False,
        out: Tensor | None = None,
    ) -> Any:
        """Return rank `root`'s x. The other ranks pass an x of the same shape and dtype, which is not read.

        out     None, or a contiguous tensor for the result; it may be x
        """
        check_root(self, root)
        if out is not None:
            out = require_fitting_out(out, x, x.shape)
        return self._collective("broadcast", algorithm, async_op, x, root=root, out=out)

    def all_to_all(
        self,
        x: Tensor,
        send_sizes: Sizes = None,
        recv_sizes: Sizes = None,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Any:
        """Send chunk s of x, along dim 0, to rank s; chunk s of the result is received from rank s."""
        return self._collective(
            "all_to_all", algorithm, async_op, x, send_sizes=send_sizes, recv_sizes=recv_sizes
        )

    def barrier(self) -> None:
        """Return once every rank has called this: ceil(log2 p) steps of one byte (the dissemination barrier)."""
        self.custom("barrier", partial(dissemination_barrier, self))

    @_disable_dynamo  # torch.compile of a model that communicates breaks its graphs here
    def _collective(self, kind: str, algorithm: str, async_op: bool, x: Tensor, **kwargs: Any) -> Any:
        if x.dim() == 0 and kind in ("reduce_scatter", "all_gather", "all_to_all"):
            raise ValueError(f"{kind} acts on dim 0, and x has none: use x.view(1)")
        # Divide first, because the sum could overflow.
        if kwargs.get("op") == "mean" and x.dtype == torch.float16:
            x = x / self.size
            kwargs["op"] = "sum"
        if kwargs.get("out") is not None and self.kept is not None:
            raise ValueError(
                f"{kind} into `out`, in a forward that is repeated without messages: use the tensor it returns"
            )
        function = find_algorithm(self, kind, algorithm, x, kwargs.get("sizes"), self.default_algorithm)
        signature = f"{kind} {kwargs['op']}" if "op" in kwargs else kind
        return self._run(kind, signature, partial(function, x, **kwargs), async_op, x.shape)
