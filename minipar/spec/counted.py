"""Bytes and messages that a rank sends, through a Comm or through torch.distributed, counted in one place.

A Comm counts its own messages as it posts them. Whatever else is sent reaches torch's dispatcher as an operator of `c10d`
or `_c10d_functional`, whoever asks for it: a function of torch.distributed, DDP's reducer, FSDP, a DTensor, a functional
collective. There it is seen, forward and backward. What the backend then does (gloo, NCCL) is not seen, so a collective
counts as the messages of an algorithm by which it is often done:

    all_reduce, reduce_scatter, all_gather   a ring: 2(p-1)/p of x, (p-1)/p of x, p-1 times the own chunk
    broadcast, reduce                        a binomial tree
    gather, scatter, all_to_all              one message for each part that leaves the rank
    send                                     itself

Not seen: threads that an implementation starts, calls of a backend's own methods, symmetric memory, and sockets, files or
shared memory of its own.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minipar.comm import Comm
from minipar.comm.transport.traffic import Traffic
from minipar.support.chunks import chunk_sizes
from minipar.support.live_bytes import has_wrappers

Messages = list[tuple[int, int]]  # (rank that it is sent to, bytes)
KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)
SENDS_NOTHING = re.compile(r"recv|barrier|wait_tensor|check_for_nan|wrap_tensor")
IN_A_LIST = ("reducescatter", "scatter", "alltoall")  # a tensor for each rank, not one that is cut
COUNTS_AS = dict.fromkeys(KINDS[:3], "a ring") | {"broadcast": "a binomial tree", "reduce": "a binomial tree"}
TORCHS = "torch's "  # begins the kind of what did not go through a Comm


class Posted(TorchDispatchMode):
    """Context manager that calls book(kind, messages to world ranks) for each send and collective of torch.distributed.

    Those by which a Comm sends its messages are left out. `most`: None, or the largest number of ranks that a group may
    have: more are those of torch's default group, of which some do not take part, so that all would wait. `waited` is
    called for each wait for a functional collective.
    """

    def __init__(
        self,
        book: Callable[[str, Messages], None] = lambda kind, messages: None,
        most: int | None = None,
        waited: Callable[[], None] = lambda: None,
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self._book, self._most, self._waited = book, most, waited

    def __enter__(self) -> Posted:
        ACTIVE.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        ACTIVE.remove(self)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_wrappers(types):
            return NotImplemented
        kwargs = kwargs or {}
        if getattr(function, "namespace", "") in ("c10d", "_c10d_functional"):
            given = dict(zip((argument.name for argument in function._schema.arguments), args)) | kwargs
            if function._opname == "wait_tensor":
                self._waited()
            group = _group(given)
            if group is not None and not _is_of_a_comm():
                self._see(function._opname, given, group)
        return function(*args, **kwargs)

    def _see(self, name: str, given: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        if self._most is not None and len(ranks) > self._most:
            raise ValueError(
                f"{name} of torch.distributed is on a group of {len(ranks)} ranks, and comm has {self._most}: "
                "pass group=comm.process_group()"
            )
        if not SENDS_NOTHING.search(name):
            kind, messages = sent_by(name, given, ranks.index(dist.get_rank()), len(ranks))
            self._book(kind, [(ranks[to], num_bytes) for to, num_bytes in messages])


ACTIVE: list[Posted] = []


def tell(kind: str, messages: Messages) -> None:
    """Tell whoever counts of messages that no dispatcher here sees: a small Comm sends from a thread of its own."""
    for posted in list(ACTIVE):
        posted._book(kind, messages)


def sent_by(name: str, given: Mapping[str, Any], rank: int, size: int) -> tuple[str, Messages]:
    """Return the kind of an operator of torch.distributed, and the messages that `rank` of `size` sends for it.

    Raises NotImplementedError for an operator that torch has had since.
    """
    right, root, xs = (rank + 1) % size, given.get("root_rank", given.get("src", 0)), _inputs(given)
    plain = name.replace("_", "")
    kind = next((kind for kind in KINDS if plain.startswith(kind.replace("_", ""))), "send")
    if name == "batch_p2p_ops":
        sent = [(to, x.nbytes) for op, to, x in zip(given["op_list"], given["peer_list"], xs) if "send" in op]
    elif name in ("send", "isend"):
        sent = [(given["dst"], x.nbytes) for x in xs]
    elif kind == "all_reduce":
        chunks = [[n * x.itemsize for n in chunk_sizes(x.numel(), size)] for x in xs]
        sent = [
            (right, mine[(rank - step) % size])
            for mine in chunks
            for step in (*range(1, size), *range(size - 1))
        ]
    elif kind == "all_gather":
        sent = [(right, x.nbytes) for x in xs for _ in range(size - 1)]
    elif kind in ("broadcast", "reduce"):
        up, down = _tree((rank - root) % size, size)
        sent = [
            ((root + place) % size, x.nbytes) for x in xs for place in (down if kind == "broadcast" else up)
        ]
    elif kind == "gather":
        sent = [(root, x.nbytes) for x in xs if rank != root]
    elif kind == "send":
        raise NotImplementedError(
            f"torch.distributed's {name} is not counted: minipar/spec/counted.py has no formula"
        )
    else:
        parts = [xs] if plain in IN_A_LIST else [_parts(given, x, size) for x in xs]
        sent = [(to, part.nbytes) for mine in parts for to, part in enumerate(mine) if to != rank]
        sent = [(right, num_bytes) for _, num_bytes in sent] if kind == "reduce_scatter" else sent
    return kind, [(to, num_bytes) for to, num_bytes in sent if num_bytes]


def counts_as(kind: str) -> str:
    """Return the kind of what was sent, with the algorithm as which it counts: "torch's all_reduce as a ring"."""
    algorithm = COUNTS_AS.get(kind.removeprefix(TORCHS))
    return f"{kind} as {algorithm}" if algorithm else kind


def _tree(place: int, size: int) -> tuple[list[int], list[int]]:
    """Return the places above (one, or none) and below a place of a binomial tree, of distances ..., 4, 2, 1."""
    lowest = place & -place or size
    distances = [1 << i for i in reversed(range(size.bit_length())) if 1 << i < lowest]
    return [place - lowest] if place else [], [place + d for d in distances if place + d < size]


def _inputs(given: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator sends, whatever it calls them."""
    names = [name for name in given if name.startswith("input") and "split" not in name]
    return tree_leaves(given[names[0]] if names else given.get("tensors", given.get("tensor")))


def _parts(given: Mapping[str, Any], x: Tensor, size: int) -> tuple[Tensor, ...]:
    sizes = given.get("input_split_sizes")
    return x.split(sizes) if sizes else x.reshape(-1).tensor_split(size)


def _group(given: Mapping[str, Any]) -> Any:
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        resolve: Any = torch._C._distributed_c10d._resolve_process_group
        return resolve(group)
    return dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


def _is_of_a_comm() -> bool:
    """Return whether a Comm is about to send a message, which it counts: whether its code is the first that is not torch's.

    Modes around this one are called from here and from minipar.support.
    """
    ours = ("torch.", "minipar.support.", __name__)
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("minipar.comm.", "minipar.spec.own_comm")
    )


def within(comm: Comm) -> Posted:
    """Return a context in which torch.distributed is refused on groups of more ranks than `comm` has."""
    return Posted(most=comm.size)


@contextmanager
def recording(comm: Comm, events: list[tuple[str, int]]) -> Iterator[Comm]:
    """Add ("launch", bytes) and ("wait", 0) to `events` for what is reduced or gathered. A broadcast is neither.

    Yields a copy of `comm`, whose collectives are seen as torch's are.
    """

    def posted(kind: str, messages: Messages) -> None:
        if kind != "broadcast":
            events.append(("launch", sum(n for _, n in messages)))

    def waited(wait: Callable[..., Any] = lambda: None, *args: Any) -> Any:
        if not _is_of_a_comm():
            events.append(("wait", 0))
        return wait(*args)

    def called(
        collective: Callable[..., Any], x: Tensor, *args: Any, async_op: bool = False, **options: Any
    ) -> Any:
        events.append(("launch", x.nbytes))
        handle = SimpleNamespace(wait=partial(waited, collective(x, *args, async_op=True, **options).wait))
        return handle if async_op else handle.wait()

    other, wait = copy.copy(comm), dist.Work.wait
    for name in ("all_reduce", "all_reduce_", "reduce_scatter", "all_gather"):
        if hasattr(comm, name):
            setattr(other, name, partial(called, getattr(comm, name)))
    with patch.object(dist.Work, "wait", lambda *args: waited(wait, *args)), Posted(posted, waited=waited):
        yield other


@contextmanager
def counted(world: Comm) -> Iterator[Traffic]:
    """Count all that this rank sends inside, in the traffic of `world`, from zero."""
    world.traffic.reset()
    with Posted(
        lambda kind, messages: world.traffic.book(TORCHS + kind, sum(n for _, n in messages), len(messages))
    ):
        yield world.traffic
