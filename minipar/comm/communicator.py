"""Comm: my rank, the size of the group, and how to send to and receive from the others.

Everything above talks through `send`, `recv` and `exchange`; the collectives in `ring.py`, `tree.py` and the others are
built from these three. This file and `launch.py` are the only ones that call torch.distributed.
"""

from __future__ import annotations

import atexit

# longer than 250 lines because torch.distributed, and with it torch's own collectives, is called from here alone
import threading
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from minipar.comm.chunks import check_sizes, reduction
from minipar.comm.collectives import Collectives
from minipar.comm.link import Link, Message, PeerLost, Posted
from minipar.comm.pairwise import all_to_all_sizes
from minipar.comm.ring import gathered_sizes
from minipar.comm.traffic import Traffic
from minipar.trace import Trace

# their names from torch 2.13 on, which warns of the old ones
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def connect(store_path: str, rank: int, size: int, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Join a process group that meets in a file. gloo listens on loopback alone: no port opens to the network."""
    store = dist.FileStore(store_path, size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    return dist.group.WORLD


class Comm(Collectives):
    """One rank's membership in a group of ranks: a value to pass, never a global.

    rank, size   my place in this group, 0 <= rank < size
    ranks        the members as world ranks, in this group's order
    device       where the tensors to communicate live
    traffic      what this rank has sent through this Comm and its subgroups
    trace        None, or the Trace into which every operation of this world is recorded

    The collectives (`all_reduce` and so on) are methods of `Collectives`. A Comm is a stream: see `stream.py`.
    """

    def __init__(self, link: Link, ranks: tuple[int, ...], name: str, parent: Comm | None = None):
        self._link = link
        self._channel = link.channel(name, ranks)
        self._peers = tuple(link.ranks.index(r) for r in ranks)  # the members as ranks of the transport
        self.ranks = ranks
        self.name = name
        self.rank = ranks.index(link.rank)
        self.size = len(ranks)
        self.device = link.device
        self.traffic = Traffic(parent.traffic if parent else None)

    @classmethod
    def from_process_group(cls, group=None, timeout_s: float = 60.0, node_size: int | None = None) -> Comm:
        """A world on a process group somebody else initialised (None: the default one)."""
        group = dist.group.WORLD if group is None else group
        ranks = tuple(dist.get_process_group_ranks(group))
        nccl = "nccl" in dist.get_backend(group)
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        link = Link(group, ranks, dist.get_rank(), device, timeout_s, node_size=node_size)
        atexit.register(link.let_go)
        return cls(link, ranks, "world")

    @property
    def trace(self) -> Trace | None:
        return self._link.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._link.trace = trace

    @property
    def timeout_s(self) -> float:
        """How long one wait may take before it is an error."""
        return self._link.timeout_s

    @property
    def node_size(self) -> int | None:
        """How many neighbouring ranks of this group share a machine, where the launcher knows it and all have so many.

        None where it is one, or all: there are no two levels then.
        """
        if self._link.node_size is None:
            return None
        nodes = [r // self._link.node_size for r in self.ranks]
        g = nodes.count(nodes[0])
        blocks = [node for node in dict.fromkeys(nodes) for _ in range(g)]
        return g if nodes == blocks and 1 < g < self.size else None

    def subgroup(self, ranks, name: str) -> Comm:
        """The Comm of `ranks` (ranks of this Comm, in the order given), of which I must be one.

        On gloo this sends nothing and costs microseconds. On NCCL it makes a process group, so the members of
        overlapping subgroups must make them in one order: `Mesh` does. Two subgroups of the same ranks and name are one
        stream; what runs at the same time needs names of its own.
        """
        ranks = tuple(ranks)
        if (
            self.rank not in ranks
            or len(set(ranks)) < len(ranks)
            or not all(0 <= r < self.size for r in ranks)
        ):
            raise ValueError(
                f"subgroup {name!r} of ranks {ranks}: use distinct ranks below {self.size}, rank {self.rank} among them"
            )
        comm = Comm(self._link, tuple(self.ranks[r] for r in ranks), f"{self.name}/{name}", parent=self)
        comm.preferred = self.preferred
        if self.device.type == "cuda" and comm.size > 1:
            comm.process_group()
        return comm

    def process_group(self) -> dist.ProcessGroup:
        """The torch process group of exactly these ranks, in this order; the first call makes it, on all of them."""
        if self.ranks == self._link.ranks:
            return self._link.group
        key = (self.name, self.ranks)
        if key not in self._link.groups:
            self._link.groups[key] = _named_group(list(self.ranks), self.name, self.timeout_s)
        return self._link.groups[key]

    def report(self, value) -> None:
        """Hand a value to the `on_report` of whoever called `run`; elsewhere, nobody listens."""
        if self._link.report is not None:
            self._link.report(value)

    def scratch(self, num_elems: int, dtype: torch.dtype, use: str = "arrived") -> torch.Tensor:
        """Memory for the collective under way, kept from call to call; for each use its own."""
        return self._channel.scratch(num_elems, dtype, use)

    # Point to point --------------------------------------------------------------------------------------------

    def send(self, x: torch.Tensor, to: int, async_op: bool = False):
        """Send x to rank `to`, which must receive the same shape and dtype. Returns when x may be changed again.

        With async_op returns a handle at once; x must not change before its `wait()`. An empty tensor is not sent.
        """
        return self._point_to_point("send", x, to, None, None, async_op)

    def recv(self, shape, dtype: torch.dtype, source: int, async_op: bool = False):
        """Receive a tensor of this shape and dtype from rank `source`; with async_op, a handle whose `wait()` gives it."""
        out = torch.empty(shape, dtype=dtype, device=self.device)
        return self._point_to_point("recv", None, None, out, source, async_op)

    def exchange(self, x, to: int | None, shape, dtype, source: int | None, out=None, async_op: bool = False):
        """Send x to rank `to` and receive a tensor from rank `source`, as one operation that cannot deadlock.

        Either of `to` and `source` may be None (at the end of a line), and both may be this rank itself (a copy, no
        message). `out` is where to receive, if not into a new tensor. Returns what was received, or None.
        """
        if source is not None and out is None:
            out = torch.empty(shape, dtype=dtype, device=self.device)
        return self._point_to_point("exchange", x, to, out, source, async_op)

    def _point_to_point(self, kind: str, x, to, out, source, async_op: bool):
        # Every step of a collective comes through here, just after a copy has emptied the caches: so it is kept short.
        if not (to is None or 0 <= to < self.size) or not (source is None or 0 <= source < self.size):
            raise ValueError(
                f"{kind} between ranks {to} and {source} of {self._channel.name}: its ranks are 0 to {self.size - 1}"
            )
        stream = self._channel.stream
        if stream.inside():  # a step of a collective
            posted = self._post(kind, x, to, out, source)
            return posted if async_op else posted.wait()
        if async_op and stream.idle():
            return stream.run(partial(self._post, kind, x, to, out, source))
        return self._on_stream(kind, lambda: self._post(kind, x, to, out, source).wait(), async_op)

    def _post(self, kind: str, x, to, out, source) -> Posted:
        """Hand a send and a receive to the transport.

        The send first: gloo then writes the message from its own thread, once the peer is ready for it. A receive
        posted first has the peer's message arrive while this thread is writing its own on the same connection, for
        which gloo's thread then polls in vain.
        """
        if to == self.rank or source == self.rank:
            if to != source:
                raise ValueError(
                    f"{kind} on {self._channel.name}: rank {self.rank} must send to itself and receive from itself"
                )
            out.copy_(x)
            return Posted(self._link, (), out)
        if self.device.type == "cuda":
            return self._post_grouped(kind, x, to, out, source)
        works = []
        if to is not None and x.numel():
            x = x.detach().contiguous() if x.requires_grad or not x.is_contiguous() else x
            works.append(self._hand_over("send", x, to, self._channel.sent))
            self.traffic.book(self._channel.kind or kind, x.nbytes)
        if source is not None and out.numel():
            works.append(self._hand_over("receive", out, source, self._channel.received))
        return Posted(self._link, works, out)

    def _hand_over(self, verb: str, x: torch.Tensor, peer: int, counter) -> tuple:
        # A collective on the stream's thread and a message posted beside it count apart.
        lane = "p2p" if self._channel.kind is None else "collective"
        key, num_bytes = (self.ranks[peer], lane), x.nbytes
        number = counter[key][0] if key in counter else 0
        counter[key] = (number + 1, num_bytes)
        transport = self._link.group.send if verb == "send" else self._link.group.recv
        message = Message(verb, key[0], self._channel.name, lane, number, num_bytes)
        try:
            work = transport([x], self._peers[peer], self._channel.tag(lane, number, num_bytes))
        except RuntimeError as error:  # a connection that is known to be broken
            raise PeerLost(f"rank {self._link.rank} could not {message}: {error}") from None
        return work, message, x

    def _post_grouped(self, kind: str, x, to, out, source) -> Posted:
        """On NCCL a send and a receive are one grouped call on the current stream, matched by order alone."""
        group, ops = self.process_group(), []
        if source is not None and out.numel():
            ops.append(dist.P2POp(dist.irecv, out, self.ranks[source], group))
        if to is not None and x.numel():
            x = x.detach().contiguous()
            x.record_stream(torch.cuda.current_stream())  # another stream may free it while this one sends it
            ops.append(dist.P2POp(dist.isend, x, self.ranks[to], group))
            self.traffic.book(self._channel.kind or kind, x.nbytes)
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return Posted(self._link, (), out)

    # Native collectives ----------------------------------------------------------------------------------------

    def _native(self, collective: str, x: torch.Tensor, **kwargs):
        """torch's own collective on these ranks: what the hand-written ones are measured against."""
        self.traffic.book("native", x.nbytes)
        x, group = x.detach().contiguous(), self.process_group()
        # Its own collectives take no deadline, only their group does.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_s), group)
        return getattr(self, f"_native_{collective}")(group, x, **kwargs)

    def _native_all_reduce(self, group, x, op, out=None):
        out = x.clone() if out is None else out.copy_(x)
        dist.all_reduce(out, _native_op(op, x), group)
        return out.div_(self.size) if op == "mean" else out

    def _native_reduce(self, group, x, root, op):
        out = x.clone()
        dist.reduce(out, self.ranks[root], _native_op(op, x), group)
        return None if self.rank != root else out.div_(self.size) if op == "mean" else out

    def _native_broadcast(self, group, x, root):
        out = x.clone()
        dist.broadcast(out, self.ranks[root], group)
        return out

    def _native_reduce_scatter(self, group, x, op, sizes, out=None):
        sizes = check_sizes(sizes, x.shape[0], self.size, "sizes")
        padded = torch.cat([_pad(chunk, max(sizes)) for chunk in x.split(sizes)])  # it takes equal ones only
        padded_own = x.new_empty((max(sizes), *x.shape[1:]))
        reduce_scatter_single(padded_own, padded, _native_op(op, x), group)
        own = padded_own[: sizes[self.rank]]
        own = own.clone() if out is None else out.copy_(own)
        return own.div_(self.size) if op == "mean" else own

    def _native_all_gather(self, group, x, sizes, out=None):
        sizes = gathered_sizes(self, x, sizes)
        padded = x.new_empty((self.size * max(sizes), *x.shape[1:]))
        all_gather_single(padded, _pad(x, max(sizes)), group)
        chunks = [c[:n] for c, n in zip(padded.chunk(self.size), sizes)]
        if out is not None:
            return torch.cat(chunks, out=out)
        return padded if min(sizes) == max(sizes) else torch.cat(chunks)

    def _native_all_to_all(self, group, x, send_sizes, recv_sizes):
        send_sizes, recv_sizes = all_to_all_sizes(self, x, send_sizes, recv_sizes)
        out = x.new_empty((sum(recv_sizes), *x.shape[1:]))
        dist.all_to_all_single(out, x, recv_sizes, send_sizes, group)
        return out

    # The stream ------------------------------------------------------------------------------------------------

    def _collective(self, kind: str, operation, async_op: bool):
        """Run a collective on the stream; inside another one of this Comm it is a part of that."""
        if self._channel.stream.inside():
            return operation()
        return self._on_stream(kind, partial(self._as_kind, kind, operation), async_op)

    def _as_kind(self, kind: str, operation):
        self._channel.kind = kind
        try:
            return operation()
        finally:
            self._channel.kind = None

    def _on_stream(self, kind: str, operation, async_op: bool):
        trace, on_wait = self._link.trace, None
        if trace is not None:
            operation = partial(_recorded, trace, f"{kind} {self.name}", operation)
            on_wait = partial(trace.add, "wait", f"{kind} {self.name}")
        stream = self._channel.stream
        return (stream.submit if async_op else stream.run)(operation, on_wait)


def _named_group(ranks: list[int], name: str, timeout_s: float) -> dist.ProcessGroup:
    """A process group whose members find each other by its name.

    dist.new_group counts instead: how many groups a process has made so far. That hangs where a member has made more
    than another, as ranks of a pool that serves worlds of several sizes have.
    """
    c10d = dist.distributed_c10d
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.get_backend(),
        c10d._get_default_store(),
        group_name=f"{name} {ranks}",
        timeout=timedelta(seconds=timeout_s),
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def _native_op(op: str, x: torch.Tensor):
    return getattr(dist.ReduceOp, reduction(op, x.dtype).native)


def _pad(x: torch.Tensor, length: int) -> torch.Tensor:
    """x with dim 0 lengthened to `length`; what is added is never read."""
    return x if x.shape[0] == length else torch.cat([x, x.new_zeros((length - x.shape[0], *x.shape[1:]))])


def _recorded(trace: Trace, name: str, operation):
    thread = threading.current_thread()
    with trace.span("communicate", name, "main" if thread is threading.main_thread() else thread.name):
        return operation()
