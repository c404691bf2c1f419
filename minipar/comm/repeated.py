"""A forward that is repeated without its messages: what its collectives returned is kept, and returned again.

For activation checkpointing, whose recomputation would otherwise send everything once more:

    first forward     kept = results of the Comms' collectives, in call order
    recomputation     each collective returns its kept result, and sends nothing

The backward's own collectives run as usual. Costs the memory of the results, from the forward to the backward.
Source: communication-aware activation checkpointing, of TED, arXiv:2303.06318.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from minipar.comm.communicator import Comm
from minipar.comm.transport.stream import Handle


class Kept:
    """The results of one Comm's collectives in a forward, each returned once by its repetition.

    Raises RuntimeError if a result was written to in between.
    """

    def __init__(self) -> None:
        self.results: list[_Result] = []
        self.repeats = False

    def collective(self, run: Callable[[], Any], async_op: bool) -> Any:
        """Return what `run()` returns, a value or a handle; in the repetition, the same without running it."""
        if self.repeats and self.results:
            value = self.results.pop(0).value()
            return Handle.finished_with(value) if async_op else value
        if self.repeats:  # the forward was repeated before, and has used them up
            return run()
        result = _Result(run())
        self.results.append(result)
        return result if async_op else result.keep(result.started)


class _Result:
    """A collective's value, or its handle until somebody waits for it."""

    def __init__(self, started: Any):
        self.started = started
        self._value: Any = None
        self._versions: list[int] = []

    def wait(self) -> Any:
        return self._value if self.started is None else self.keep(self.started.wait())

    def keep(self, value: Any) -> Any:
        # Autograd may make `value` itself the output of a function; what is kept shares its memory alone.
        self._value = tree_map_only(Tensor, Tensor.detach, value)
        self._versions = _versions(self._value)
        self.started = None
        return value

    def value(self) -> Any:
        self.wait()  # the forward may not have waited for it
        if _versions(self._value) != self._versions:
            raise RuntimeError(
                "a forward wrote to what a collective had returned, and cannot be repeated without messages"
            )
        return self._value


def _versions(value: Any) -> list[int]:
    return [x._version for x in tree_leaves(value) if isinstance(x, Tensor)]


def without_messages(
    comms: Sequence[Comm],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a forward and of its recomputation: the `context_fn` of torch's `checkpoint`."""
    kept = [Kept() for _ in comms]
    return _during(comms, kept, False), _during(comms, kept, True)


@contextmanager
def _during(comms: Sequence[Comm], kept: Sequence[Kept], repeats: bool) -> Iterator[None]:
    before = [comm.kept for comm in comms]
    for comm, own in zip(comms, kept):
        own.repeats, comm.kept = repeats, own
    try:
        yield
    finally:
        for comm, outer in zip(comms, before):
            comm.kept = outer
