"""The place of a run's optimizer states: host memory for `--offload cpu`, a file for `--offload disk`."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from minipar.data_parallel.memory import Memory, RestingPlace
from minipar.extras.offload.memories import Disk, Host
from minipar.extras.offload.offloaded_optimizer import OffloadedOptimizer


class OnHost(RestingPlace):
    """Keep states in CPU memory."""

    def memory(self, folder: str | None = None) -> Memory:
        super().memory(folder)
        return Host()

    def optimizer(
        self,
        config: Any,
        modules: list[Any],
        groups: list[dict[str, Any]],
        optimizer_cls: type[Optimizer],
        **options: Any,
    ) -> OffloadedOptimizer:
        return OffloadedOptimizer(modules, groups, optimizer_cls, config.torch_master_dtype, **options)


class OnDisk(OnHost):
    """Keep states in a file in a folder."""

    # A checkpoint saved in the background would need a copy of the states in memory, where they do not fit.
    waits_for_saves = True

    def memory(self, folder: str | None = None) -> Memory:
        return Disk(folder)


ON_HOST, ON_DISK = OnHost(), OnDisk()
