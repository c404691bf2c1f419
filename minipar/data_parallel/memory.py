"""The place of shards and optimizer states between two updates: the device, or a memory that an extra provides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minipar.config.choices import MEMORIES
from minipar.data_parallel.arguments import ParamGroup
from minipar.data_parallel.optimizer_interface import OptimizerInterface
from minipar.support.trace import Trace

Tensors = dict[str, Tensor]  # a chunk's master weights and optimizer states, by key, each [n/p]


class Memory:
    """Ordinary memory. `device` is where `copy_of` puts its copies; None: on the original's device."""

    device: torch.device | None = None
    # Whether states that the optimizer makes in ordinary memory must be moved to this memory.
    moves_optimizer_state = False

    def copy_of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.detach().to(dtype, copy=True)

    def advise_read(self, x: Tensor) -> None:
        """Tell the operating system that `copy_to` will read this tensor."""

    def copy_to(self, target: Tensor, x: Tensor) -> None:
        target.copy_(x)

    def prefetch(self, offloaded: Tensors, trace: Trace | None = None) -> None:
        """Begin to read the tensors that `load` will be asked for."""

    def load(self, offloaded: Tensors, trace: Trace | None = None) -> Tensors:
        """Return these tensors in ordinary memory: copies, or the tensors themselves if they are there already."""
        return offloaded

    def store(self, offloaded: Tensors, trace: Trace | None = None) -> None:
        """Begin to write back what `load` returned for these tensors, which must not be read until `finish`."""

    def release(self, offloaded: Tensors) -> None:
        """Free what `load` returned for these tensors; it was not changed, so nothing is written back."""

    def finish(self) -> None:
        """Wait until everything is written. Raises the error of a write that failed."""

    def forget(self) -> None:
        """After an error, wait for the writes that have begun, and forget what was read but not written back."""


class RestingPlace:
    """A choice of `--offload`: here ordinary memory, and an ordinary optimizer.

    waits_for_saves  whether training waits for a checkpoint to be written, because a copy of the states would not fit
    """

    waits_for_saves = False

    def memory(self, folder: str | None = None) -> Memory:
        if folder is not None:
            raise ValueError(
                f"folder={folder!r} is for states in a file; use offload='disk', or leave it out"
            )
        return Memory()

    def optimizer(
        self,
        config: Any,
        modules: list[nn.Module],
        groups: list[ParamGroup],
        optimizer_cls: type,
        **options: Any,
    ) -> OptimizerInterface | None:
        """Return an optimizer over FSDP's shards that keeps its states there; None: use an ordinary optimizer."""
        return None


ON_DEVICE = RestingPlace()


def memory_for(offload: str | None, folder: str | None = None) -> Memory:
    """Return the memory that `offload` names. None or "none": the device's own. Extras provide the other names.

    folder  where to put the file, for a memory that keeps states in a file; None: the system's temporary folder
    Raises ValueError for an unknown name, and for a `folder` if the memory uses no file.
    """
    place: RestingPlace = MEMORIES[offload or "none"].load()
    return place.memory(folder)
