"""Comm: a rank's membership in a group of ranks, with point-to-point messages and collectives as methods.

The collectives in `ring.py`, `tree.py` and the other modules are built from three methods: `send`, `recv` and
`exchange`.
"""

from __future__ import annotations

import copy
from functools import partial

import torch

from minipar.chunks import check_sizes
from minipar.comm.barrier import dissemination_barrier
from minipar.comm.collectives import check_root, find_algorithm, require_algorithm, require_fitting_out
from minipar.comm.existing_group import transport_on
from minipar.comm.hierarchical import Levels, levels
from minipar.comm.messages import Traffic
from minipar.comm.ring import gathered_sizes
from minipar.comm.stream import Handle, run_recorded
from minipar.comm.transport import PendingMessages, PostedLater, Transport
from minipar.trace import Trace


class Comm:
    """One rank's membership in a group of ranks, passed explicitly. Its operations run in call order: see `stream.py`.

    rank, size   this rank's place in the group, 0 <= rank < size
    ranks        the members as world ranks, in this group's order
    device       device of the tensors to communicate
    traffic      bytes and messages this rank has sent through this Comm and its subgroups
    levels       None, or the Comms of its two levels, where it is known to be on several nodes, several ranks on each
    trace        None, or the Trace that records every operation of this world
    timeout_s    seconds a single wait may take before it raises

    All ranks of the Comm must call its collectives in the same order. None writes to its input, except `all_reduce_`.

    algorithm    a name of `collectives.ALGORITHMS`, "native" for torch's own, or "auto"
    async_op     return a handle at once, whose `wait()` returns the result; x must not change before that

    Gather and scatter act on dim 0. The modules of the algorithms state their costs.
    """

    def __init__(self, transport: Transport, ranks: tuple[int, ...], name: str, parent: Comm | None = None):
        self._transport, self._channel = transport, transport.channel(name, ranks)
        self.ranks, self.name = ranks, name
        self.rank, self.size = ranks.index(transport.rank), len(ranks)
        self.device = transport.device
        self.traffic = Traffic(parent.traffic if parent else None)
        self.default_algorithm: str | None = parent.default_algorithm if parent else None
        # Made with the Comm: on NCCL, a hook that sums gradients would be too late.
        self.levels: Levels | None = levels(self, self.node_size) if self.node_size else None

    @classmethod
    def from_process_group(cls, group=None, timeout_s: float = 60.0, node_size: int | None = None) -> Comm:
        """Make a world on a process group that the caller has initialised (None: the default group).

        Two worlds on one group never receive each other's messages. All ranks must make them in the same order.
        """
        transport = transport_on(group, timeout_s, node_size)
        return cls(transport, transport.ranks, "world")

    @property
    def trace(self) -> Trace | None:
        return self._transport.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._transport.trace = trace

    @property
    def timeout_s(self) -> float:
        return self._transport.timeout_s

    @property
    def node_size(self) -> int | None:
        """Ranks of this group per node; None if unknown, unequal, not contiguous, one per node, or all on one."""
        return self._transport.ranks_per_node(self.ranks)

    def subgroup(self, ranks, name: str) -> Comm:
        """Make the Comm of `ranks` (ranks of this Comm, in the order given), which must include this rank.

        On gloo this sends nothing and takes microseconds. On NCCL it makes a communicator, so ranks that share several
        subgroups must make them in the same order; `Mesh` does. Subgroups with the same ranks and name share one stream:
        operations that run at the same time need subgroups of different names.
        """
        ranks = tuple(ranks)
        if self.rank not in ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ValueError(
                f"subgroup {name!r} of ranks {ranks}: use distinct ranks below {self.size}, rank {self.rank} among them"
            )
        return Comm(self._transport, tuple(self.ranks[r] for r in ranks), f"{self.name}/{name}", parent=self)

    def using(self, algorithm: str) -> Comm:
        """Return this Comm with `algorithm` as the meaning of "auto" in every collective that has it; "auto" resets it."""
        require_algorithm(algorithm)
        other = copy.copy(self)
        other.default_algorithm = None if algorithm == "auto" else algorithm
        return other

    def process_group(self):
        """Return the torch process group of these ranks, in this order. The first call creates it and is collective."""
        return self._transport.process_group(self._channel.key)

    def report(self, value) -> None:
        """Pass a value to the `on_report` callback of `minipar.run`; outside a local pool, do nothing."""
        if self._transport.report is not None:
            self._transport.report(value)

    def scratch(self, num_elems: int, dtype: torch.dtype, use: str = "received") -> torch.Tensor:
        """Return scratch memory for the running collective, one buffer for each `use`, reused by later calls."""
        return self._channel.scratch(num_elems, dtype, use)

    # Collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto", async_op: bool = False):
        """Return the sum (mean, max or min) over ranks of x, on every rank."""
        return self._collective("all_reduce", algorithm, async_op, x, op=op)

    def all_reduce_(self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto", async_op: bool = False):
        """All-reduce in place: the result is written into x, which must be contiguous."""
        if not x.is_contiguous():
            raise ValueError(f"all_reduce_ needs a contiguous tensor, and x has the strides {x.stride()}")
        return self._collective("all_reduce", algorithm, async_op, x, op=op, out=x.detach())

    def reduce(self, x, root: int = 0, op: str = "sum", algorithm: str = "auto", async_op: bool = False):
        """Return the sum over ranks of x on rank `root`, None on the other ranks."""
        check_root(self, root)
        return self._collective("reduce", algorithm, async_op, x, root=root, op=op)

    def reduce_scatter(self, x, op="sum", sizes=None, algorithm="auto", async_op: bool = False, out=None):
        """Return this rank's chunk, along dim 0, of the sum over ranks of x.

        sizes   chunk length of each rank; None: as torch.chunk cuts
        out     None, or a contiguous tensor for the result; it may be this rank's chunk of x
        """
        if out is not None:
            out = require_fitting_out(out, x, check_sizes(sizes, x.shape[0], self.size, "sizes")[self.rank])
        return self._collective("reduce_scatter", algorithm, async_op, x, op=op, sizes=sizes, out=out)

    def all_gather(self, x, sizes=None, algorithm: str = "auto", async_op: bool = False, out=None):
        """Concatenate all ranks' x along dim 0.

        sizes   length of each rank's x; None: all equal
        out     None, or a contiguous tensor for the result; x may be this rank's chunk of it
        """
        if out is not None:
            out = require_fitting_out(out, x, sum(gathered_sizes(self, x, sizes)))
        return self._collective("all_gather", algorithm, async_op, x, sizes=sizes, out=out)

    def broadcast(self, x, root: int = 0, algorithm: str = "auto", async_op: bool = False):
        """Return rank `root`'s x. The other ranks pass an x of the same shape and dtype, which is not read."""
        check_root(self, root)
        return self._collective("broadcast", algorithm, async_op, x, root=root)

    def all_to_all(self, x, send_sizes=None, recv_sizes=None, algorithm="auto", async_op: bool = False):
        """Send chunk s of x, along dim 0, to rank s; chunk s of the result is received from rank s."""
        sizes = {"send_sizes": send_sizes, "recv_sizes": recv_sizes}
        return self._collective("all_to_all", algorithm, async_op, x, **sizes)

    def custom(self, kind: str, operation, async_op: bool = False):
        """Run `operation()`, made of sends, receives and exchanges on this Comm, as one collective, and return its result.

        The stream runs it as a single operation; `traffic` and `trace` record it under the name `kind`.
        """
        return self._run(kind, kind, operation, async_op)

    def barrier(self) -> None:
        """Return once every rank has called this: ceil(log2 p) steps of one byte (the dissemination barrier)."""
        self._run("barrier", "barrier", partial(dissemination_barrier, self), async_op=False)

    def _collective(self, kind: str, algorithm: str, async_op: bool, x: torch.Tensor, **kwargs):
        if x.dim() == 0 and kind in ("reduce_scatter", "all_gather", "all_to_all"):
            raise ValueError(f"{kind} acts on dim 0, and x has none: use x.view(1)")
        if kwargs.get("op") == "mean" and x.dtype == torch.float16:  # the sum could overflow: divide first
            x, kwargs["op"] = x / self.size, "sum"
        function = find_algorithm(self, kind, algorithm, x, kwargs.get("sizes"))
        signature = f"{kind} {kwargs['op']}" if "op" in kwargs else kind
        return self._run(kind, signature, partial(function, x, **kwargs), async_op, x.shape)

    def _run(self, kind: str, signature: str, operation, async_op: bool, shape: torch.Size | None = None):
        """Run a collective on the stream, or directly where another collective of this Comm calls it."""
        if self._channel.stream.inside():
            return Handle.finished_with(operation()) if async_op else operation()
        return self._on_stream(kind, partial(self._run_labelled, kind, signature, shape, operation), async_op)

    def _run_labelled(self, kind: str, signature: str, shape, operation):
        channel = self._channel
        channel.kind, channel.signature, channel.shape = kind, signature, shape
        channel.num_collectives += 1
        try:
            return operation()
        finally:
            channel.kind, channel.signature, channel.shape = None, "", None

    def _on_stream(self, kind: str, operation, async_op: bool):
        trace, on_wait, stream = self._transport.trace, None, self._channel.stream
        if trace is not None:
            operation = partial(run_recorded, trace, f"{kind} {self.name}", stream, operation)
            on_wait = partial(trace.add, "wait", f"{kind} {self.name}")
        return (stream.submit if async_op else stream.run)(operation, on_wait, kind)

    # Point to point --------------------------------------------------------------------------------------------

    def send(self, x: torch.Tensor, to: int, async_op: bool = False):
        """Send x to rank `to`, which must receive the same shape and dtype. Returns once x may be changed.

        With async_op it returns a handle at once, and x must not change before its `wait()`. An empty tensor is not sent.
        """
        return self._point_to_point("send", x, to, None, None, async_op)

    def recv(self, shape, dtype: torch.dtype, source: int, async_op: bool = False):
        """Return a tensor of this shape and dtype received from rank `source`; with async_op, a handle for it."""
        out = torch.empty(shape, dtype=dtype, device=self.device)
        return self._point_to_point("recv", None, None, out, source, async_op)

    def exchange(self, x, to: int | None, shape, dtype, source: int | None, out=None, async_op: bool = False):
        """Send x to rank `to` and receive a tensor from rank `source`, as one operation that cannot deadlock.

        `to` or `source` may be None (at the end of a line), and both may be this rank (a copy, no message). `out`: None,
        or the tensor to receive into. Returns the received tensor, or None.
        """
        if source is not None and out is None:
            out = torch.empty(shape, dtype=dtype, device=self.device)
        return self._point_to_point("exchange", x, to, out, source, async_op)

    def _point_to_point(self, kind: str, x, to, out, source, async_op: bool):
        # Kept short: every step of a collective runs this, right after a copy that has emptied the CPU caches.
        if not (to is None or 0 <= to < self.size) or not (source is None or 0 <= source < self.size):
            raise ValueError(f"{kind} between ranks {to} and {source} of {self._channel.key}: its ranks are 0 to "
                             f"{self.size - 1}")  # fmt: skip
        stream, post = self._channel.stream, self._post
        if stream.inside():  # a step of a collective
            posted = post(kind, x, to, out, source)
            return posted if async_op else posted.wait()
        if async_op and self._transport.posts_ahead:
            posting = partial(post, kind, x, to, out, source)
            return stream.run(posting) if stream.idle() else PostedLater(stream.submit(posting, what=kind))
        return self._on_stream(kind, lambda: post(kind, x, to, out, source).wait(), async_op)

    def _post(self, kind: str, x, to, out, source) -> PendingMessages:
        if to == self.rank or source == self.rank:
            if to != source:
                raise ValueError(
                    f"{kind} on {self._channel.key}: rank {self.rank} must send to itself and receive from itself"
                )
            out.copy_(x.detach())
            return PendingMessages(self._transport, (), out)
        return self._transport.post(self._channel, kind, x, to, out, source, self.traffic)
