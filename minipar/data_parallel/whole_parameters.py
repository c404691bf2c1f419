"""ZeRO whose chunks end where parameters end: every parameter, with its state, belongs to one rank as a whole.

    flat shards   | w1 ........|... w2 ..|... w3 ....... |     equal to the byte, and a rank has parts of matrices
    whole         | w1 ............ | w2 ... | w3 ...... |     as equal as whole parameters can be; for Muon and Shampoo

Each parameter is given to the rank that has least work so far, the most expensive one first. The largest share is then at
most the mean plus the most expensive parameter, and at most 4/3 - 1/(3p) of the best possible (Graham, 1969).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from minipar.data_parallel.buckets import Bucket
from minipar.data_parallel.muon import ADAMW, newton_schulz_flops
from minipar.data_parallel.sharded_bucket import ShardedBucket
from minipar.data_parallel.zero import ZeroOptimizer
from minipar.mesh import Placement, placement_of

ADAMW_FLOPS = 12  # of an element's update


class WholeParameterZero(ZeroOptimizer):
    """`ZeroOptimizer` that cuts between parameters only, for an `optimizer_cls` that needs whole matrices.

    cost   a function from (parameter, its group) to its work in an update; the default is Muon's FLOPs

    The update of a rank takes as long as its parameters: `balance` says how equal that is. Sends what ZeroOptimizer sends,
    per rank as unequal as the shares are: in a ring, all shares but its own, then all but the next rank's. Arguments and
    everything else as ZeroOptimizer, which explains them; sums are DDP's to rounding.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_cls,
        comm,
        stage: int = 1,
        *,
        cost: Callable[[nn.Parameter, dict], float] | None = None,
        **options,
    ):
        self._cost = update_flops if cost is None else cost
        self.owners: dict[nn.Parameter, int] = {}
        super().__init__(params, optimizer_cls, comm, stage, per_element=True, **options)

    def balance(self) -> list[float]:
        """Return the largest share of the update's work over the mean share, for each Comm: 1 is equal."""
        loads: dict[object, list[float]] = {}
        for param, cost in self._costs(self.owners).items():
            comm = self._comm_of(param)
            loads.setdefault(comm, [0.0] * comm.size)[self.owners[param]] += cost
        return [max(load) * len(load) / sum(load) for load in loads.values()]

    def _costs(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, float]:
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        return {param: self._cost(param, group_of[param]) for param in params}

    def _make_buckets(self, params: list[nn.Parameter]) -> list[ShardedBucket]:
        by_comm: dict[object, dict[nn.Parameter, float]] = {}
        for param, cost in self._costs(params).items():
            by_comm.setdefault(self._comm_of(param), {})[param] = cost
        for comm, costs in by_comm.items():
            self.owners |= zip(costs, assign([*costs.values()], comm.size))
        return super()._make_buckets(params)

    def _sharded(self, bucket: Bucket, *options) -> ShardedBucket:
        owners = [self.owners[param] for param in bucket.params]
        ordered = [
            param
            for _, _, param in sorted(zip(owners, range(len(owners)), bucket.params), key=lambda x: x[:2])
        ]
        return WholeParameterBucket(Bucket(ordered, bucket.comm, bucket.flagged), *options, self.owners)


class WholeParameterBucket(ShardedBucket):
    """A `ShardedBucket` whose chunks end where parameters end.

    A shard is the whole parameter, in its shape and with its placement, or empty.
    """

    def __init__(
        self, bucket: Bucket, keep_full_grads: bool, reduce_dtype, axis: str, owners: dict[nn.Parameter, int]
    ):
        self._owners = owners
        super().__init__(bucket, keep_full_grads, reduce_dtype, axis)

    def _chunk_sizes(self) -> list[int]:
        """Return the ranks' chunks: a rank's begins with its first parameter; padding and flags are the last owner's."""
        end, sizes = len(self.flat), [0] * self.comm.size
        for param in reversed(self.params):
            sizes[self._owners[param]] += end - self.starts[param]
            end = self.starts[param]
        return sizes

    def slice_of_chunk(self, param: nn.Parameter, chunk: Tensor) -> Tensor:
        part = super().slice_of_chunk(param, chunk)
        return part.view(param.shape) if part.numel() else part

    def _placement_of_shard(self, param: nn.Parameter) -> Placement:
        mine = self._owners[param] == self.comm.rank
        return placement_of(param) if mine else super()._placement_of_shard(param)


def assign(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return a rank for each cost: the largest first, each to the rank with least so far, the lower one where equal."""
    loads, ranks = [0.0] * num_ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        ranks[i] = loads.index(min(loads))
        loads[ranks[i]] += costs[i]
    return ranks


def update_flops(param: nn.Parameter, group: dict) -> float:
    """Return the FLOPs of Muon's update of a parameter, or of AdamW's in a group with rule="adamw"."""
    if group.get("rule") == ADAMW or param.dim() < 2:
        return ADAMW_FLOPS * param.numel()
    return newton_schulz_flops(tuple(param.shape))
