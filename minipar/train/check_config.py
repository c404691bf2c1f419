"""Checks before any rank starts: a ValueError for what does not fit, with the reason and a value that works."""

from __future__ import annotations

from minipar.context.limits import check_context_parallel, padded_length
from minipar.errors import require_divides
from minipar.mesh import Mesh
from minipar.schedules import make_schedule
from minipar.tensor_parallel.limits import check_tensor_parallel


def check_layout(config) -> None:
    """Raise ValueError where the mesh, the model and the batch of a TrainConfig do not fit each other."""
    Mesh(config.world_size, **config.mesh_sizes)
    _check_batch(config)
    _check_stages(config)
    check_tensor_parallel(config.model, config.tp)
    _check_tokens(config)
    _check_experts(config)
    _check_activations(config)


def _check_batch(config) -> None:
    require_divides("dp", config.dp, "batch_size", config.batch_size)
    samples = config.batch_size // config.dp
    require_divides("microbatches", config.microbatches, "a rank's samples (batch_size/dp)", samples)


def _check_stages(config) -> None:
    schedule = make_schedule(config.schedule, config.pp, config.microbatches, config.chunks)
    layers = config.model.num_layers
    if schedule.num_stages > layers:
        raise ValueError(
            f"pp={config.pp} with schedule={config.schedule!r} has {schedule.num_stages} stages, "
            f"and num_layers={layers}; use at most {layers} stages"
        )


def _check_tokens(config) -> None:
    """Check how a sample's tokens are divided: over cp, and over tp under sequence parallelism."""
    whole = padded_length(config.seq_len, config.cp, config.cp_layout) if config.cp > 1 else config.seq_len
    if whole != config.seq_len:
        raise ValueError(
            f"cp={config.cp} with cp_layout={config.cp_layout!r} does not divide seq_len={config.seq_len}; "
            f"use seq_len={whole}"
        )
    check_context_parallel(
        config.model, config.cp, config.seq_len, config.cp_layout, config.cp_attention, tp=config.tp
    )
    if config.sequence_parallel:
        require_divides(
            "tp", config.tp, "a rank's tokens of a sample (seq_len/cp)", config.seq_len // config.cp
        )


def _check_experts(config) -> None:
    if config.model.num_experts:
        require_divides("ep", config.ep, "num_experts", config.model.num_experts)
    elif config.ep > 1:
        raise ValueError(f"ep={config.ep} spreads experts, and num_experts=0: the model has none; use ep=1")


def _check_activations(config) -> None:
    if not config.partition_activations:
        return
    if config.recompute != "full":
        raise ValueError(
            f"partition_activations cuts the inputs that recompute=full keeps, and recompute={config.recompute}; "
            "use recompute=full"
        )
    if config.sequence_parallel:
        raise ValueError(
            "partition_activations: with sequence_parallel a rank keeps only its part of these inputs anyway; "
            "use one of the two"
        )
