"""The interface by which a run's gradients are averaged. `parallelize.py`, training steps and checkpoints call it.

The default implementation, `Plain`, averages uncompressed gradients. `--compress NAME` selects another one: see
`minipar.extras.compress`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from minipar.comm import Comm
from minipar.data_parallel.compressors import Compressors
from minipar.data_parallel.optimizer_interface import OptimizerInterface
from minipar.mesh import Placement
from minipar.train.checkpoint.saver import StoredPart
from minipar.train.optim import Group

if TYPE_CHECKING:
    from minipar.config.train_config import TrainConfig
    from minipar.train.checkpoint.restore import Checkpoint
    from minipar.train.parallelize import RankState

CommOf = Callable[[Tensor], Comm]  # from a parameter to the Comm over which its gradient is averaged
Compress = Callable[[Comm], object]


class Average(NamedTuple):
    """One rank's record of one averaging: the tensors that this rank gave, and the means that all `ranks` got.

    comm           the name of the Comm: experts may have one of their own with the same ranks
    is_compressed  False for a plain mean
    cuts           None, or for each rank the ranges (from, to) of the flattened tensors whose mean only that rank got
    """

    comm: str
    ranks: tuple[int, ...]
    is_compressed: bool
    placements: list[Placement]
    given: list[Tensor]
    got: list[Tensor]
    cuts: list[list[tuple[int, int]]] | None = None


# A function from all ranks' records of one averaging to the means of its tensors.
Means = Callable[[list[Average]], list[Tensor]]


class ReferenceOptimizer(Protocol):
    """As much of a torch optimizer as the reference in one process uses."""

    @property
    def param_groups(self) -> list[Group]: ...

    def step(self) -> Any: ...


class GradientAveraging(Protocol):
    """The interface of an averaging that `--compress` can select.

    compressor      returns the `compress` of DDP and ZeroOptimizer, a function from Comm to compressor; None: all-reduce
    make_optimizer  returns an optimizer that averages momenta or weights itself; None: use the run's optimizer
    begin_step      is called before each step
    stored_parts    returns this rank's part of the averaging's state, for a checkpoint; called by all ranks
    restore         loads that state, on any number of ranks
    averages_by     returns the compressors with which an optimizer of `make_optimizer` averages, and whether they compress
    one_process     returns a function that computes, in one process, the means that an averaging should give
    in_one_process  returns what the reference in one process updates weights by, given the optimizer of the run's family
    """

    def compressor(self, config: TrainConfig) -> Compress | None: ...

    def make_optimizer(
        self, config: TrainConfig, groups: list[Group], optimizer_cls: type[Optimizer], comm_of: CommOf,
        **options: Any,
    ) -> OptimizerInterface | None: ...  # fmt: skip

    def begin_step(self, config: TrainConfig, state: RankState, step: int) -> None: ...

    def stored_parts(self, state: RankState, comm_of: CommOf) -> Iterable[StoredPart]: ...

    def restore(self, state: RankState, checkpoint: Checkpoint, comm_of: CommOf) -> None: ...

    def averages_by(self, optimizer: OptimizerInterface) -> list[tuple[Compressors, bool]]: ...

    def one_process(self, config: TrainConfig) -> Means: ...

    def in_one_process(self, config: TrainConfig, optimizer: Optimizer) -> ReferenceOptimizer: ...


class Plain:
    """Average uncompressed gradients: nothing to do, and no state."""

    def compressor(self, config: TrainConfig) -> Compress | None:
        return None

    def make_optimizer(
        self, config: TrainConfig, groups: list[Group], optimizer_cls: type[Optimizer], comm_of: CommOf,
        **options: Any,
    ) -> OptimizerInterface | None:  # fmt: skip
        return None

    def begin_step(self, config: TrainConfig, state: RankState, step: int) -> None:
        pass

    def stored_parts(self, state: RankState, comm_of: CommOf) -> Iterable[StoredPart]:
        return ()

    def restore(self, state: RankState, checkpoint: Checkpoint, comm_of: CommOf) -> None:
        pass

    def averages_by(self, optimizer: OptimizerInterface) -> list[tuple[Compressors, bool]]:
        return []

    def one_process(self, config: TrainConfig) -> Means:
        raise NotImplementedError("whole gradients are averaged without messages of a compressor")

    def in_one_process(self, config: TrainConfig, optimizer: Optimizer) -> ReferenceOptimizer:
        return optimizer


PLAIN = Plain()
