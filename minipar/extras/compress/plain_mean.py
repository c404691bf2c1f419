"""The interface of a compressor, and one that does not compress: the plain mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minipar.comm import Comm

Tensors = Mapping[Any, Tensor]  # by key, such as a parameter
Means = dict[Any, Tensor]
State = dict[Any, dict[str, Tensor]]  # by key and name


class Compressor:
    """Averages tensors over the ranks of one Comm, sending fewer bytes than an all-reduce. The base has no state.

    means   returns the mean of each tensor over ranks, equal on all ranks, by one message. All ranks must pass the same
            keys in the same order, in every step, because a tensor's residual is found by its key
    state   returns the state that the next step needs; all ranks must call it. Tensors named "residual" are this rank's
            own, with the elements of the tensor with that key; all others are the same on every rank
    load    loads a state; must be called before the first `means`
    """

    comm: Comm

    def __call__(self, x: Tensor, key: object = 0) -> Tensor:
        """Return the mean of x over ranks, in x's shape and dtype. `key` identifies x among the tensors of a step."""
        return self.means({key: x})[key]

    @torch.no_grad()
    def means(self, tensors: Tensors) -> Means:
        sent = {key: x for key, x in tensors.items() if x.numel()}
        return {**tensors, **(self._means(sent) if sent and self.comm.size > 1 else {})}

    def _means(self, tensors: Tensors) -> Means:
        """Return the means of one or more tensors over two or more ranks."""
        raise NotImplementedError

    def state(self) -> State:
        return {}

    def load(self, state: State) -> None:
        """Load nothing, as there is no state."""


class PlainMean(Compressor):
    """The uncompressed mean, with all tensors in one all-reduce. Sends 2(p-1)/p of their bytes."""

    def __init__(self, comm: Comm):
        self.comm = comm

    def _means(self, tensors: Tensors) -> Means:
        return unfused(self.comm.all_reduce(fused(tensors), "mean"), tensors)


def fused(tensors: Tensors) -> Tensor:
    """Concatenate all tensors into one vector of float32, or of float64 if the tensors are float64."""
    return torch.cat([widened(x).flatten() for x in tensors.values()])


def unfused(flat: Tensor, tensors: Tensors) -> Means:
    """Cut a vector made by `fused` into tensors of the shapes and dtypes of `tensors`."""
    return {key: part.to(tensors[key].dtype) for key, part in cut(flat, tensors).items()}


def cut(flat: Tensor, tensors: Tensors) -> Means:
    """Cut a vector into tensors of the shapes of `tensors`, in the vector's dtype. Elements left over are padding."""
    sizes = [x.numel() for x in tensors.values()]
    parts = flat[: sum(sizes)].split(sizes)
    return {key: part.view(x.shape) for (key, x), part in zip(tensors.items(), parts)}


def widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
