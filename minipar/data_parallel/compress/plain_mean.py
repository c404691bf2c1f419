"""The mean of tensors over ranks as it is, and one compressor per Comm: what compressors and optimizers are made of.

A compressor has

    means({key: x})    the mean over ranks of each x, all in one message. The same on every rank, which give the same keys
                       in the same order, each step those of the steps before: a key's residual is found by it
    state()            {key: {name: tensor}}: what the next step needs, by key; a collective call. Tensors named "residual"
                       are this rank's own, in the shape of x; all others are the same on every rank
    load(state)        before the first `means`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class PlainMean:
    """The uncompressed mean, all tensors in one all-reduce: 2(p-1)/p of their bytes."""

    def __init__(self, comm, algorithm: str = "auto"):
        self.comm, self.algorithm = comm, algorithm

    @torch.no_grad()
    def means(self, tensors: dict) -> dict:
        if self.comm.size == 1 or not tensors:
            return dict(tensors)
        return unfused(self.comm.all_reduce(fused(tensors), "mean", algorithm=self.algorithm), tensors)

    def state(self) -> dict:
        return {}

    def load(self, state: dict) -> None:
        """Do nothing: there is no state."""


class OwnGradients:
    """No mean at all: each rank keeps its own gradient, for an optimizer that averages something else, or later."""

    sends_nothing = True

    def __init__(self, comm):
        self.comm = comm

    def means(self, tensors: dict) -> dict:
        return dict(tensors)

    state, load = PlainMean.state, PlainMean.load


class Compressors:
    """A compressor per Comm, each made by `make(comm)`: experts have fewer replicas than other parameters.

    on   False: reduce gradients as they are, for the steps of a warm-up
    """

    def __init__(self, make: Callable | None, comm_of: Callable | None = None):
        self._make, self._comm_of, self.on = make, comm_of, True
        self.by_comm: dict = {}

    def of(self, comm):
        """Return the compressor of this Comm; None where gradients are reduced as they are."""
        if self._make is None or not self.on or comm.size == 1:
            return None
        if comm not in self.by_comm:
            self.by_comm[comm] = self._make(comm)
        return self.by_comm[comm]

    def means(self, tensors: dict) -> dict:
        """Return the means of tensors whose keys are parameters, each over the ranks that hold a replica of it."""
        by_comm: dict = {}
        for key, x in tensors.items():
            by_comm.setdefault(self._comm_of(key), {})[key] = x
        found = {}
        for comm, own in by_comm.items():
            average = self.of(comm)
            found |= own if average is None else average.means(own)
        return found


def fused(tensors: dict) -> Tensor:
    """One vector of all tensors, in float32 or, where they are, in float64."""
    return torch.cat([widened(x).flatten() for x in tensors.values()])


def unfused(flat: Tensor, tensors: dict) -> dict:
    """Cut a vector as `fused` made it: tensors of the shapes and dtypes of `tensors`."""
    return {key: part.to(tensors[key].dtype) for key, part in cut(flat, tensors).items()}


def cut(flat: Tensor, tensors: dict) -> dict:
    """Cut a vector into parts of the shapes of `tensors`, in their order, in its own dtype; what is longer is padding."""
    sizes = [x.numel() for x in tensors.values()]
    parts = flat[: sum(sizes)].split(sizes)
    return {key: part.view(x.shape) for (key, x), part in zip(tensors.items(), parts)}


def widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
