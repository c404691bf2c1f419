"""Compressed averaging of gradients in place of an all-reduce. `minipar.extras.compress` has several compressors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeGuard

from torch import Tensor

from minipar.comm import Comm


class Compressor(Protocol):
    """Averages tensors over the ranks of one Comm, sending fewer bytes than an all-reduce.

    means   {parameter: its gradient on this rank} -> {parameter: the mean over ranks}
    """

    def means(self, tensors: Mapping[Tensor, Tensor], /) -> Mapping[Tensor, Tensor]: ...


class ScatteringCompressor(Compressor, Protocol):
    """A compressor that can also replace a reduce-scatter: each rank gets only its own part of the means.

    scatters         True
    scattered_means  for each rank, {parameter: the flat piece of its gradient that the rank keeps} -> this rank's pieces of
                     the means. A parameter is cut wherever a rank's chunk ends; then several ranks have a piece of it.
                     FSDP, whose parameters are shards, passes stand-ins of the unsharded parameters in their place
    """

    scatters: bool

    def scattered_means(self, parts: Sequence[Mapping[Tensor, Tensor]], /) -> Mapping[Tensor, Tensor]: ...


def can_scatter(compressor: Compressor) -> TypeGuard[ScatteringCompressor]:
    return bool(getattr(compressor, "scatters", False))


class Compressors:
    """One compressor per Comm, made by `make(comm)`; experts have another Comm, as they have fewer replicas.

    on    if False, as in a warm-up, gradients are reduced uncompressed
    keys  the parameters, or their stand-ins, by which compressors identify gradients from one step to the next
    """

    def __init__(self, make: Callable[[Comm], Compressor] | None, comm_of: Callable[[Tensor], Comm]):
        self.make, self._comm_of, self.on = make, comm_of, True
        self.by_comm: dict[Comm, Compressor] = {}
        self.keys: list[Tensor] = []

    def of(self, comm: Comm) -> Compressor | None:
        """Return the compressor of this Comm; None if gradients are reduced uncompressed."""
        if self.make is None or not self.on or comm.size == 1:
            return None
        if comm not in self.by_comm:
            self.by_comm[comm] = self.make(comm)
        return self.by_comm[comm]

    def means(self, tensors: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return parameter -> mean of its tensor over the ranks that hold a replica of the parameter."""
        by_comm: dict[Comm, dict[Tensor, Tensor]] = {}
        for key, x in tensors.items():
            by_comm.setdefault(self._comm_of(key), {})[key] = x
        found: dict[Tensor, Tensor] = {}
        for comm, own in by_comm.items():
            average = self.of(comm)
            found |= own if average is None else average.means(own)
        return found
