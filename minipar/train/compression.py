"""Cheap messages in a run: what compresses, the optimizers that average by themselves, and their state in checkpoints.

compression_config.py has the table of methods. A rank's residuals are its own, others' are others': a checkpoint has them
all, by the index of the rank among the replicas. On another number of replicas each rank takes their mean, so that what was
not sent yet is still sent. Tensors are stored under the names of their parameters, so any other axis may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, takewhile

import torch
from torch import Tensor

from minipar.data_parallel.compress import (
    CompressedMean,
    Compressors,
    DiLoCo,
    Float8,
    Int8,
    OneBitAdam,
    OneBitLamb,
    OwnGradients,
    PowerSGD,
    Selective,
    Sign,
    TopK,
    TwoLevelMean,
    ZeroOneAdam,
)
from minipar.data_parallel.optimizer_interface import TorchOptimizerAdapter
from minipar.mesh import Placement, placement_of
from minipar.train.checkpoint import StoredPart
from minipar.train.compression_config import METHODS, warmup_of
from minipar.train.optim import BETAS

KIND = "compression"  # of the parts in a checkpoint
SIGN_BLOCK = 256  # elements with a scale of their own: a row of a rare word is not lost among others

# What compresses ----------------------------------------------------------------------------------------------------


def gradient_compressor(config) -> Callable | None:
    """Return the `compress` of DDP and ZeroOptimizer: None for none; where something else is averaged, own gradients."""
    if config.compress == "none":
        return None
    if METHODS[config.compress].averages != "gradient":
        return OwnGradients
    chosen = _in_feed_forward if config.compress == "tagc" else _is_compressed
    return partial(Selective, compress=_vector_compressor(config), select=chosen)


def _vector_compressor(config) -> Callable:
    if config.compress == "powersgd":
        return partial(PowerSGD, rank=config.compress_rank)
    top = TopK(config.compress_fraction, torch.promote_types(config.torch_reduce_dtype, torch.float32))
    codec = {"int8": Int8(), "fp8": Float8(), "topk": top, "tagc": top}.get(config.compress, Sign(SIGN_BLOCK))
    if config.compress_node_size is not None:
        return partial(TwoLevelMean, codec=codec, node_size=config.compress_node_size)
    return partial(CompressedMean, codec=codec)


def _is_compressed(param: Tensor) -> bool:
    """Vectors are few and precious; copies on several tp ranks must stay equal, so they are not rounded with neighbours."""
    return param.dim() > 1 and "tp" not in placement_of(param).replicated


def _in_feed_forward(param: Tensor) -> bool:
    name = placement_of(param).name
    return _is_compressed(param) and ".mlp." in name


def begin_step(state, config, step: int) -> None:
    """Switch compression on once the warm-up is over. 0/1 Adam sees to its own."""
    plain = 0 if config.compress in ("none", "zero-one-adam") else warmup_of(config)
    for compressors in state.compressors:
        compressors.on = step >= plain


# Optimizers that average by themselves ------------------------------------------------------------------------------


def make_own_optimizer(
    config, groups: list[dict], make_optimizer, comm_of, **options
) -> TorchOptimizerAdapter | None:
    """Return the optimizer of a method that averages momenta or weights; None for the others.

    make_optimizer, options  the optimizer that runs between two agreements on weights
    """
    if config.compress == "none" or METHODS[config.compress].averages == "gradient":
        return None
    warmup = warmup_of(config)
    if METHODS[config.compress].averages == "weights":
        outer = {"outer_lr": 1.0, "momentum": 0.0} if config.compress == "local-sgd" else {}
        inner = make_optimizer(groups, **options)
        return LocalOptimizer(
            DiLoCo(inner, comm_of, config.compress_every, warmup=warmup, reduces_warmup=False, **outer)
        )
    compress = partial(Selective, compress=_vector_compressor(config), select=_is_compressed)
    own = {"onebit-adam": OneBitAdam, "onebit-lamb": OneBitLamb}.get(config.compress)
    own = partial(ZeroOneAdam, every=config.compress_every) if own is None else own
    return TorchOptimizerAdapter(
        own(groups, comm_of, warmup, compress=compress, reduces_warmup=False, lr=config.lr, betas=BETAS)
    )


class LocalOptimizer(TorchOptimizerAdapter):
    """`OptimizerInterface` of DiLoCo and local SGD. Its state is the outer velocity; the inner state is a rank's own."""

    def __init__(self, optimizer: DiLoCo):
        super().__init__(optimizer)
        velocity = optimizer.velocity or [None] * len(optimizer.params)
        self.shared = {p: {} if v is None else {"velocity": v} for p, v in zip(optimizer.params, velocity)}

    def tensors_and_states(self) -> Iterator[tuple[Tensor, dict]]:
        return iter(self.shared.items())

    def own_states(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for param in self.optimizer.params:
            state = self.optimizer.optimizer.state.get(param, {})
            yield param, {name: x for name, x in state.items() if x.dim()}

    @torch.no_grad()
    def resume(self, step: int, own: dict[Tensor, dict[str, Tensor]]) -> None:
        """Go on after `step` steps, at which the ranks had agreed, from the restored weights and states."""
        outer = self.optimizer
        outer.num_steps = step
        for i, (param, shared) in enumerate(self.shared.items()):
            outer.agreed[i].copy_(param)
            if outer.momentum and "velocity" in shared:
                outer.velocity[i].copy_(shared["velocity"])
            if own[param]:
                outer.optimizer.state[param] = {"step": torch.tensor(float(step)), **own[param]}


# Checkpoints --------------------------------------------------------------------------------------------------------


def stored_parts(state, comm_of) -> Iterator[StoredPart]:
    """Yield this rank's state of compression. Collective."""
    for compressors in _all_compressors(state):
        for comm, compressor in compressors.by_comm.items():
            for param, tensors in compressor.state().items():
                for name, x in tensors.items():
                    yield StoredPart(KIND, _place(name, param, x, comm.rank), x)
    if isinstance(state.optimizer, LocalOptimizer):
        for param, tensors in state.optimizer.own_states():
            for name, x in tensors.items():
                yield StoredPart(KIND, _own(name, param, comm_of(param).rank), x)


@torch.no_grad()
def restore_compression(state, checkpoint, comm_of) -> None:
    """Load what `stored_parts` stored, on any number of replicas; nothing where the run was not compressed."""
    by_stage = [[p for p in stage.parameters() if p.requires_grad] for stage in state.stages]
    params, all_compressors = [p for own in by_stage for p in own], _all_compressors(state)
    one_each = len(all_compressors) == len(by_stage)  # DDP's; else one for all: ZeRO's, or an optimizer's
    for compressors, own_params in zip(all_compressors, by_stage if one_each else [params]):
        compressors.on, by_comm = True, {}
        for param in own_params:
            if found := _read_state(checkpoint, param, comm_of(param)):
                by_comm.setdefault(comm_of(param), {})[param] = found
        for comm, found in by_comm.items():
            if (compressor := compressors.of(comm)) is not None:
                compressor.load(found)
    if isinstance(state.optimizer, LocalOptimizer):
        own = {
            p: {n: _read_own(checkpoint, n, p, comm_of(p)) for n in ("exp_avg", "exp_avg_sq")} for p in params
        }
        own = {p: {name: x for name, x in tensors.items() if x is not None} for p, tensors in own.items()}
        state.optimizer.resume(checkpoint.step, own)


def _all_compressors(state) -> list[Compressors]:
    own = getattr(getattr(state.optimizer, "optimizer", None), "compressors", None)
    return state.compressors if own is None else [own]


def _place(name: str, param: Tensor, x: Tensor, data_rank: int) -> Placement:
    if name == "residual":
        return _own(name, param, data_rank)
    return _factor(param, x.shape) if name == "factor" else _renamed(param, f"{name} of")


def _own(name: str, param: Tensor, data_rank: int) -> Placement:
    return _renamed(param, f"data rank {data_rank}'s {name} of")


def _renamed(param: Tensor, prefix: str) -> Placement:
    placement = placement_of(param)
    return replace(placement, name=f"{prefix} {placement.name}", tied_to=None)


def _factor(param: Tensor, shape) -> Placement:
    placement = placement_of(param)
    return Placement.whole(f"factor of {placement.name} from {placement.start}", shape)


def _read_state(checkpoint, param: Tensor, comm) -> dict[str, Tensor]:
    found = {"residual": _read_own(checkpoint, "residual", param, comm)}
    found["residual_of_mean"] = _read(checkpoint, _renamed(param, "residual_of_mean of"), param)
    factor = _factor(param, ())
    if checkpoint.has(KIND, factor.name):
        shape = checkpoint.global_shape(KIND, factor.name)
        found["factor"] = _read(checkpoint, _factor(param, shape), param)
    return {name: x for name, x in found.items() if x is not None}


def _read_own(checkpoint, name: str, param: Tensor, comm) -> Tensor | None:
    """This rank's tensor or, on another number of replicas, the mean of all."""
    held = takewhile(lambda i: checkpoint.has(KIND, _own(name, param, i).name), count())
    held = list(held)
    if len(held) == comm.size:
        held = [comm.rank]
    read = [_read(checkpoint, _own(name, param, i), param) for i in held]
    return sum(read[1:], read[0]) / len(read) if len(read) > 1 else read[0] if read else None


def _read(checkpoint, placement: Placement, param: Tensor) -> Tensor | None:
    if not checkpoint.has(KIND, placement.name):
        return None
    return checkpoint.read(KIND, placement).to(param.device)
