"""Compression in a run: the compressors, the optimizers that do the averaging themselves, and their checkpointed state.

choices.py has the table of methods. Each rank has its own residuals, and a checkpoint stores the residuals of all replicas,
by rank. If a run resumes with another number of replicas, each replica takes the mean of the stored residuals, so that
everything not yet sent is still sent. Tensors are stored under the names of their parameters, so the sizes of all other
axes may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, count, takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from minipar.comm import Comm
from minipar.comm.transport.stream import Pending
from minipar.data_parallel.arguments import CommOf
from minipar.data_parallel.optimizer_interface import OptimizerInterface, TorchOptimizerAdapter
from minipar.data_parallel.reductions import BucketReduction, ReduceBucket, reduce_plainly
from minipar.expert import gradient_comm
from minipar.extras.compress.codecs import Codec, Float8, Int8, Sign, TopK
from minipar.extras.compress.compressed_buckets import CompressedBuckets, Compressors, own_gradients
from minipar.extras.compress.compressed_mean import CompressedMean
from minipar.extras.compress.diloco import DiLoCo
from minipar.extras.compress.one_process import OneProcessMeans
from minipar.extras.compress.onebit_adam import OneBitAdam
from minipar.extras.compress.onebit_lamb import OneBitLamb
from minipar.extras.compress.plain_mean import Compressor, State
from minipar.extras.compress.power_sgd import PowerSGD
from minipar.extras.compress.selective import Selective
from minipar.extras.compress.zero_one_adam import ZeroOneAdam
from minipar.mesh import Placement, placement_of
from minipar.train.averaging import Averager
from minipar.train.checkpoint.saver import StoredPart
from minipar.train.optim import BETAS, Group

if TYPE_CHECKING:
    from minipar.config.train_config import TrainConfig
    from minipar.train.checkpoint.restore import Checkpoint
    from minipar.train.parallelize import RankState

MakeCompressor = Callable[[Comm], Compressor]

KIND = "compression"  # names these tensors in a checkpoint, which stores tensors by kind
# Number of elements that share a scale: few, so that the embeddings of rare words, which have small gradients, get small
# scales.
SIGN_BLOCK = 256
# The codec of a method that encodes vectors; top-k's and TAGC's depend on the run.
CODEC_OF: dict[str, Codec] = {
    "int8": Int8(),
    "fp8": Float8(),
    **dict.fromkeys(("sign", "onebit-adam", "zero-one-adam", "onebit-lamb"), Sign(SIGN_BLOCK)),
}

# Compressors -----------------------------------------------------------------------------------------------------------


class Compressed(Averager):
    """Averages by the method of `--compress` that the run's configuration names.

    compressors  those of buckets or, if the method averages momenta instead, of its optimizer
    """

    def __init__(self, config: TrainConfig):
        super().__init__(config)
        self._is_warm = True
        self.compressors: list[Compressors] = []
        self._reduce: ReduceBucket = own_gradients
        self.reduce_bucket = self._reduce_bucket
        if config.choice("compress").averages == "gradient":
            self._reduce = buckets = CompressedBuckets(_selective(config))
            self.compressors.append(buckets)

    def _reduce_bucket(self, reduction: BucketReduction) -> Pending:
        return reduce_plainly(reduction) if self._is_warm else self._reduce(reduction)

    def begin_step(self, step: int) -> None:
        """Switch compression on once the warm-up is over; at once for 0/1 Adam, which handles its warm-up itself."""
        self._is_warm = step < self.config.choice("compress").plain_steps(self.config)

    def make_optimizer(
        self, groups: list[Group], optimizer_cls: type[Optimizer], comm_of: CommOf, **options: Any
    ) -> OptimizerInterface | None:
        """Return the optimizer of a method that averages momenta or weights; None for other methods.

        optimizer_cls, options  the optimizer that takes the local steps between two averages of weights
        """
        config = self.config
        averages, own = config.choice("compress").averages, config.options["compress"]
        if averages == "gradient":
            return None
        if averages == "weights":
            inner = optimizer_cls(groups, **options)
            return DiLoCo(inner, comm_of, own.every, warmup=own.warmup, reduces_warmup=False)
        cls: Any = {"onebit-adam": OneBitAdam, "onebit-lamb": OneBitLamb}.get(config.compress)
        if cls is None:
            cls = partial(ZeroOneAdam, every=own.every)
        options = {"lr": config.lr, "betas": BETAS, "compress": _selective(config)}
        optimizer = cls(groups, comm_of, own.warmup, reduces_warmup=False, **options)
        self.compressors.append(optimizer.compressors)
        return TorchOptimizerAdapter(optimizer)

    # Checkpoints

    def stored_parts(self, state: RankState) -> Iterator[StoredPart]:
        by_comm = chain.from_iterable(own.by_comm.items() for own in self.compressors)
        states = [(comm.rank, compressor.state()) for comm, compressor in by_comm]
        if isinstance(state.optimizer, DiLoCo):
            comm_of = gradient_comm(state.mesh)
            states += [(comm_of(param).rank, {param: own}) for param, own in state.optimizer.own_states()]
        for rank, found in states:
            for param, tensors in found.items():
                for name, x in tensors.items():
                    x = x if name == "factor" else x.view(param.shape)
                    yield StoredPart(KIND, _place(name, param, rank, x.shape), x)

    @torch.no_grad()
    def restore(self, state: RankState, checkpoint: Checkpoint) -> None:
        """Load the state that `stored_parts` stored, on any number of replicas; nothing if the run was not compressed."""
        comm_of = gradient_comm(state.mesh)
        for compressors in self.compressors:
            by_comm: dict[Comm, State] = {}
            for param in chain.from_iterable(stage.parameters() for stage in state.stages):
                key, comm = compressors.key(param), comm_of(param)
                if comm.size > 1 and (found := _read(checkpoint, ("residual", *SHARED), key, comm)):
                    by_comm.setdefault(comm, {})[key] = found
            for comm, states in by_comm.items():
                compressors.of(comm).load(states)
        if isinstance(state.optimizer, DiLoCo):
            moments = "exp_avg", "exp_avg_sq"
            own = {p: _read(checkpoint, moments, p, comm_of(p)) for p in state.optimizer.agreed}
            state.optimizer.resume(checkpoint.step, own)


def means_in_one_process(config: TrainConfig) -> OneProcessMeans:
    """Return the function that computes, in one process, the means of recorded messages."""
    return OneProcessMeans(partial(_is_compressed, config), **_compression(config))


def _selective(config: TrainConfig) -> MakeCompressor:
    options = _compression(config)
    compress = partial(PowerSGD if "rank" in options else CompressedMean, **options)
    return partial(Selective, compress=compress, select=lambda p: _is_compressed(config, placement_of(p)))


def _compression(config: TrainConfig) -> dict[str, Any]:
    """Return the options of a run's compressor, which are those of `OneProcessMeans`, too."""
    own: Any = config.options["compress"]
    if config.compress == "powersgd":
        return {"rank": own.rank}
    if config.compress in ("topk", "tagc"):
        wide = torch.promote_types(config.torch_reduce_dtype, torch.float32)
        return {"codec": TopK(own.fraction, wide)}
    return {"codec": CODEC_OF[config.compress]}


def _is_compressed(config: TrainConfig, placement: Placement) -> bool:
    """Return whether to compress a parameter's gradient: only of matrices, and of those that no other tp rank copies.

    Copies would be encoded with different other elements on each rank, and would become unequal. Vectors have few elements
    and are sensitive to rounding. TAGC compresses feed-forward layers alone.
    """
    of_layer = config.compress != "tagc" or ".mlp." in placement.name
    return of_layer and len(placement.length) > 1 and "tp" not in placement.replicated


# Tensors in checkpoints ---------------------------------------------------------------------------------------------


SHARED = ("residual_of_mean", "factor")  # equal on all ranks; every other tensor is a rank's own


def _place(name: str, param: Tensor, data_rank: int, shape: tuple[int, ...] = ()) -> Placement:
    """Return the placement, in a checkpoint, of a tensor that belongs to a parameter; `shape` is that of a "factor"."""
    placement = placement_of(param)
    if name == "factor":
        return Placement.whole(f"factor of {placement.name} from {placement.start}", shape)
    whose = "" if name in SHARED else f"data rank {data_rank}'s "
    return replace(placement, name=f"{whose}{name} of {placement.name}", tied_to=None)


def _read(checkpoint: Checkpoint, names: Iterable[str], param: Tensor, comm: Comm) -> dict[str, Tensor]:
    """Return this rank's stored tensors of these names, or the means of all ranks' if there were other replicas."""
    found = {}
    for name in names:
        ranks = range(1) if name in SHARED else count()
        places = (_place(name, param, i) for i in ranks)
        stored = list(takewhile(lambda place: checkpoint.has(KIND, place.name), places))
        if name == "factor":
            stored = [_place(name, param, 0, checkpoint.global_shape(KIND, place.name)) for place in stored]
        if len(stored) == comm.size:
            stored = [stored[comm.rank]]
        if stored:
            xs = [checkpoint.read(KIND, place).to(comm.device) for place in stored]
            found[name] = torch.stack(xs).mean(0)
    return found
