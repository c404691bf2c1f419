"""The averaging of a run's gradients by a rank. `--compress NAME` selects another way: see `minipar.extras.compress`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from minipar.data_parallel.arguments import CommOf
from minipar.data_parallel.optimizer_interface import OptimizerInterface
from minipar.data_parallel.reductions import ReduceBucket
from minipar.train.checkpoint.saver import StoredPart
from minipar.train.optim import Group

if TYPE_CHECKING:
    from minipar.config.train_config import TrainConfig
    from minipar.train.checkpoint.restore import Checkpoint


class Averager:
    """Plain averages by DDP, ZeroOptimizer or FSDP, without a state. Each rank of a run has one of its own.

    reduce_bucket   the argument of DDP, ZeroOptimizer and FSDP; None: they reduce gradients as they are
    """

    reduce_bucket: ReduceBucket | None = None

    def __init__(self, config: TrainConfig):
        self.config = config

    def make_optimizer(
        self, groups: list[Group], optimizer_cls: type[Optimizer], comm_of: CommOf, **options: Any
    ) -> OptimizerInterface | None:
        """Return an optimizer that averages momenta or weights, or applies gradients later; None: use the run's own."""
        return None

    def begin_step(self, step: int) -> None:
        """Run before each step."""

    def stored_parts(self, state: Any) -> Iterable[StoredPart]:
        """Return this rank's part of the averaging's state, for a checkpoint. All ranks call this with their RankState."""
        return ()

    def restore(self, state: Any, checkpoint: Checkpoint) -> None:
        """Load what `stored_parts` returned, on any number of ranks."""

    def in_one_process(self, optimizer: Optimizer) -> Any:
        """Return what the reference in one process updates weights by: it has `param_groups` and `step`."""
        return optimizer
