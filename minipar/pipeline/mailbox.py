"""Messages between the ranks of a pipeline: posted early, waited for when needed, and freed once sent."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Hashable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.transport.stream import Handle, StreamThread
from minipar.schedules.schedule import Action, Schedule, output_key

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_DIMS = 8
HEADER_BYTES = 8 * (2 + MAX_DIMS)
HELD_BYTES = 2**23  # keep at most this many bytes of sent messages until the end of the step

Pair = tuple[int, int]  # (source, to)


class Sending(Protocol):
    """A message that has been posted, as `Comm.send` returns it."""

    def wait(self) -> object: ...


class Mailbox:
    """This rank's messages: activations to later stages, gradients to earlier ones.

    Each pair of ranks has one Comm per direction, so that a receive posted early delays no other message. All
    messages across boundary s, between stages s and s+1, have the shape and dtype of stage s's output, in both
    directions. The sender knows shape and dtype from its first forward. The receiver gets them in a header, sent once
    before the first message. Until then, the receiver posts the receives of a pair in order, and only when it waits for one
    of them; afterwards it posts them ahead of time.

    Sends m * elements of a stage's output per direction for every boundary between ranks, and HEADER_BYTES once for each
    boundary.
    """

    def __init__(self, comm: Comm, schedule: Schedule):
        self._rank, self._device = comm.rank, comm.device
        ranks = schedule.stage_rank
        pairs = {pair for a, b in zip(ranks, ranks[1:]) if a != b for pair in ((a, b), (b, a))}
        self._comms: dict[Pair, Comm] = {
            pair: comm.subgroup(pair, f"pipe {pair[0]} to {pair[1]}")
            for pair in sorted(pairs)  # the same order on every rank, as NCCL needs
            if comm.rank in pair
        }
        self._outbox = Outbox(HELD_BYTES if comm.device.type == "cpu" else math.inf)
        self.forget()
        self.begin()

    def forget(self) -> None:
        """Forget the shapes; the next step agrees on new shapes."""
        self._shapes: dict[Hashable, tuple[torch.Size, torch.dtype]] = {}
        self._announced: set[Hashable] = set()

    def begin(self) -> None:
        """Start a step: no message is under way."""
        self._arriving: dict[Action, Handle] = {}
        self._late: dict[Pair, deque[Action]] = {pair: deque() for pair in self._comms}

    def agree(self, action: Action, x: Tensor) -> None:
        """Require an output to have the first output's shape. Raises ValueError if it differs or cannot be sent."""
        if x.dtype not in DTYPES or x.dim() > MAX_DIMS:
            raise ValueError(
                f"stage {action.stage} returned {_describe(x.shape, x.dtype)}; the next stage takes a tensor of "
                f"floats of at most {MAX_DIMS} dims"
            )
        agreed = self._shapes.setdefault(self._boundary(action), (x.shape, x.dtype))
        if agreed != (x.shape, x.dtype):
            raise ValueError(
                f"stage {action.stage} returned {_describe(x.shape, x.dtype)} for microbatch {action.microbatch} "
                f"and {_describe(*agreed)} before; use one shape for all microbatches, and call forget_shapes() "
                "on every rank before a step of another"
            )

    def send(self, action: Action, x: Tensor, to: int) -> None:
        """Post a send of the result of `action`."""
        comm = self._comms[self._rank, to]
        boundary = self._boundary(action)
        if action.op == "F" and boundary not in self._announced:
            self._announced.add(boundary)
            self._outbox.put(comm.send(_header(x).to(self._device), 1, async_op=True), HEADER_BYTES)
        self._outbox.put(comm.send(x, 1, async_op=True), x.nbytes)

    def receive(self, action: Action, source: int) -> None:
        """Post a receive, or queue it as long as its shape is not known."""
        pair = (source, self._rank)
        if self._late[pair] or self._boundary(action) not in self._shapes:
            self._late[pair].append(action)
        else:
            self._post(action, pair)

    def wait(self, action: Action) -> Tensor:
        """Wait for the result of `action`, and return it."""
        key = output_key(action)
        if key not in self._arriving:
            pair = next(pair for pair, late in self._late.items() if action in late)
            while key not in self._arriving:
                self._post(self._late[pair].popleft(), pair)
        arrived: Tensor = self._arriving.pop(key).wait()
        return arrived

    def finish(self) -> None:
        """End a step: wait until every message has been sent."""
        self._outbox.drain()

    def _post(self, action: Action, pair: Pair) -> None:
        comm, boundary = self._comms[pair], self._boundary(action)
        if boundary not in self._shapes:
            self._shapes[boundary] = _parse(comm.recv((2 + MAX_DIMS,), torch.int64, 0))
        shape, dtype = self._shapes[boundary]
        self._arriving[output_key(action)] = comm.recv(shape, dtype, 0, async_op=True)

    def _boundary(self, action: Action) -> Hashable:
        """Return the key of the messages with the shape of this one: the stage before the boundary that it crosses."""
        return action.stage if action.op == "F" else action.stage - 1


class Outbox:
    """Messages being sent, whose tensors are freed once they have been sent.

    gloo reports that a message has been sent only to a thread that waits for it. So as soon as more than `held_bytes`
    have been put in, a thread waits for these messages; fewer bytes do not justify waking a thread, and are kept until
    the end of the step. CUDA needs no thread: its allocator keeps a tensor's memory until the streams that use it are done.
    """

    def __init__(self, held_bytes: float):
        self._limit, self._bytes = held_bytes, 0
        self._held: list[Sending] = []
        self._handles: list[Handle] = []
        self._thread: StreamThread | None = None

    def put(self, message: Sending, num_bytes: int) -> None:
        self._held.append(message)
        self._bytes += num_bytes
        if self._bytes > self._limit:
            self._wait_on_thread()

    def drain(self) -> None:
        """Wait until every message has been sent; on CUDA, make the current stream wait."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        _wait_for_all(self._held)
        self._bytes = 0

    def _wait_on_thread(self) -> None:
        if self._thread is None:
            self._thread = StreamThread("pipeline outbox")
            self._thread.start()
            weakref.finalize(self, self._thread.operations.put, None)
        handle = Handle()
        self._handles.append(handle)
        self._thread.operations.put((handle, partial(_wait_for_all, self._held)))
        self._held, self._bytes = [], 0


def _wait_for_all(messages: list[Sending]) -> None:
    while messages:
        messages.pop(0).wait()


def _header(x: Tensor) -> Tensor:
    sizes = [*x.shape, *[0] * (MAX_DIMS - x.dim())]
    return torch.tensor([DTYPES.index(x.dtype), x.dim(), *sizes], dtype=torch.int64)


def _parse(header: Tensor) -> tuple[torch.Size, torch.dtype]:
    dtype, dims, *sizes = header.tolist()
    return torch.Size(sizes[:dims]), DTYPES[dtype]


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
