"""Messages between the ranks of a group: send, receive and exchange. The hand-written collectives use nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import torch
from torch import Tensor

from minipar.comm.transport.recording import recorded
from minipar.comm.transport.stream import Handle, Operation
from minipar.comm.transport.traffic import Traffic
from minipar.comm.transport.transport import PendingMessages, PostedLater, Transport
from minipar.support.trace import Trace

# Each rank's length along dim 0. None means torch.chunk's lengths in reduce_scatter, equal ones in all_gather.
Sizes = Sequence[int] | None


class Kept(Protocol):
    """The results of collectives, kept to be returned again."""

    def collective(self, run: Callable[[], Any], async_op: bool) -> Any:
        """Return what `run()` returns, a value or with async_op a handle, or what it returned before."""


class PointToPoint:
    """One rank's membership in a group of ranks, with messages to its other members. `Comm` adds the collectives.

    rank, size   this rank's index in the group, 0 <= rank < size
    ranks        the members as world ranks, in this group's order
    device       device of the tensors to communicate
    traffic      bytes and messages this rank has sent through this Comm and its subgroups
    levels       the Comms of the group's two levels if it is known to have several nodes with several ranks each; else None
    trace        None, or the Trace that records every operation of this world
    timeout_s    seconds a single wait may take before it raises

    Its operations run in call order, on one stream: see `comm/transport/stream.py`.
    """

    def __init__(
        self, transport: Transport, ranks: tuple[int, ...], name: str, parent: PointToPoint | None = None
    ):
        self._transport = transport
        self._channel = transport.channel(name, ranks)
        self.ranks = ranks
        self.name = name
        self.rank = ranks.index(transport.rank)
        self.size = len(ranks)
        self.device = transport.device
        self.traffic: Traffic = Traffic(parent.traffic if parent else None)
        self.levels: Levels | None = None
        self._of = ""  # what the next collective sends, if its caller says

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            "a Comm cannot be deep-copied, nor a model that has one: copy a model before it is split"
        )

    @property
    def trace(self) -> Trace | None:
        return self._transport.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._transport.trace = trace

    @property
    def kept(self) -> Kept | None:
        """None, or what keeps the results of these ranks' collectives, to return them again (`comm/repeated.py`)."""
        kept: Kept | None = self._channel.kept
        return kept

    @kept.setter
    def kept(self, kept: Kept | None) -> None:
        self._channel.kept = kept

    @property
    def running(self) -> str:
        """The kind of the running collective and what it sends, as its messages say it; "" outside one."""
        return self._channel.signature

    @property
    def timeout_s(self) -> float:
        return self._transport.timeout_s

    def subgroup(self, ranks: Iterable[int], name: str) -> Self:
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
        members = tuple(self.ranks[r] for r in ranks)
        return type(self)(self._transport, members, f"{self.name}/{name}", parent=self)

    def process_group(self) -> Any:
        """Return the torch process group of these ranks, in this order. The first call creates it and is collective."""
        return self._transport.process_group(self._channel.key)

    # Messages

    def send(self, x: Tensor, to: int, async_op: bool = False) -> Any:
        """Send x to rank `to`, which must receive the same shape and dtype. Returns once x may be changed.

        With async_op it returns a handle at once, and x must not change before its `wait()`. An empty tensor is not sent.
        """
        return self._point_to_point("send", x, to, None, None, async_op)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int, async_op: bool = False) -> Any:
        """Return a tensor of this shape and dtype received from rank `source`; with async_op, a handle for it."""
        out = torch.empty(shape, dtype=dtype, device=self.device)
        return self._point_to_point("recv", None, None, out, source, async_op)

    def exchange(
        self, x: Tensor | None, to: int | None, shape: Sequence[int] | None, dtype: torch.dtype | None,
        source: int | None, out: Tensor | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Send x to rank `to` and receive a tensor from rank `source`, as one operation that cannot deadlock.

        `to` or `source` may be None (at the end of a line). Both may be this rank: then x is copied without a message.
        `out` is the contiguous tensor to receive into, or None. Returns the received tensor, or None.
        """
        if source is not None and out is None:
            assert shape is not None
            out = torch.empty(shape, dtype=dtype, device=self.device)
        elif out is not None and not (out.is_contiguous() and not out.is_conj() and not out.is_neg()):
            raise ValueError(
                f"out has the strides {out.stride()}, or is a lazy conjugate or negative; use new memory"
            )
        return self._point_to_point("exchange", x, to, out, source, async_op)

    def scratch(self, num_elems: int, dtype: torch.dtype, use: str = "received") -> Tensor:
        """Return scratch memory for the running collective, one buffer for each `use`, reused by later calls."""
        return self._channel.scratch(num_elems, dtype, use)

    def _point_to_point(
        self, kind: str, x: Tensor | None, to: int | None, out: Tensor | None, source: int | None, async_op: bool
    ) -> Any:  # fmt: skip
        # Kept short: every step of a collective runs this, right after a copy that has emptied the CPU caches.
        if not (to is None or 0 <= to < self.size) or not (source is None or 0 <= source < self.size):
            raise ValueError(
                f"{kind} between ranks {to} and {source} of {self._channel.key}: its ranks are 0 to {self.size - 1}"
            )
        if x is None and to is not None:
            raise TypeError(f"{kind} on {self._channel.key} to rank {to}: x is None")
        stream = self._channel.stream
        if stream.inside():  # a step of a collective
            posted = self._post(kind, x, to, out, source)
            return posted if async_op else posted.wait()
        if async_op and self._transport.posts_ahead:
            posting = partial(self._post, kind, x, to, out, source)
            return stream.run(posting) if stream.idle() else PostedLater(stream.submit(posting, what=kind))
        return self._on_stream(kind, lambda: self._post(kind, x, to, out, source).wait(), async_op)

    def _post(
        self, kind: str, x: Tensor | None, to: int | None, out: Tensor | None, source: int | None
    ) -> PendingMessages:
        if to != self.rank and source != self.rank:
            return self._transport.post(self._channel, kind, x, to, out, source, self.traffic)
        if to != source:
            raise ValueError(
                f"{kind} on {self._channel.key}: rank {self.rank} must send to itself and receive from itself"
            )
        assert x is not None
        assert out is not None
        if x.shape != out.shape:
            raise ValueError(
                f"{kind} of {tuple(x.shape)} with this rank itself into {tuple(out.shape)}; use one shape"
            )
        out.copy_(x.detach())
        return PendingMessages(self._transport, (), out)

    # Operations of several messages

    def custom(self, kind: str, operation: Operation, async_op: bool = False) -> Any:
        """Run `operation()`, made of sends, receives and exchanges on this Comm, as one collective, and return its result.

        The stream runs it as a single operation; `traffic` and `trace` record it under the name `kind`.
        """
        return self._run(kind, kind, operation, async_op)

    @contextmanager
    def saying(self, of: str) -> Iterator[None]:
        """Make a context in which a collective says what it sends.

        Messages meet only where both ranks say the same, and errors repeat it.
        """
        self._of = of
        try:
            yield
        finally:
            self._of = ""

    def _run(
        self, kind: str, signature: str, operation: Operation, async_op: bool, shape: torch.Size | None = None
    ) -> Any:  # fmt: skip
        """Run a collective on the stream, or directly if another collective of this Comm calls it."""
        if self._channel.stream.inside():
            return Handle.finished_with(operation()) if async_op else operation()
        if self._of:
            signature = f"{signature} of {self._of}"
        labelled = partial(self._run_labelled, kind, signature, shape, operation)
        start, kept = partial(self._on_stream, kind, labelled, async_op), self._channel.kept
        return start() if kept is None else kept.collective(start, async_op)

    def _run_labelled(self, kind: str, signature: str, shape: torch.Size | None, operation: Operation) -> Any:
        channel = self._channel
        channel.kind, channel.signature, channel.shape = kind, signature, shape
        channel.num_collectives += 1
        try:
            return operation()
        finally:
            channel.kind, channel.signature, channel.shape = None, "", None

    def _on_stream(self, kind: str, operation: Operation, async_op: bool) -> Any:
        stream = self._channel.stream
        trace = self._transport.trace
        on_wait = None
        if trace is not None:
            operation, on_wait = recorded(trace, f"{kind} {self.name}", stream, operation)
        start = stream.submit if async_op else stream.run
        return start(operation, on_wait, kind)


class Levels(NamedTuple):
    """A rank's two groups: the ranks of its node, and the ranks of all nodes with the same local rank."""

    node: PointToPoint
    across: PointToPoint
