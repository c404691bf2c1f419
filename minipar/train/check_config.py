"""Checks before any rank starts: a ValueError for what does not fit, with the reason and a value that works."""

from __future__ import annotations

import difflib
import re

from minipar.context.limits import check_context_parallel, padded_length
from minipar.errors import divisors, one_of, require_divides
from minipar.mesh import Mesh
from minipar.schedules import Schedule
from minipar.train.check_experts import check_experts
from minipar.train.check_matrices import check_matrices, ranks_of_heads
from minipar.train.slicing import check_slices, schedule_of

RECOMPUTE = ("none", "selective", "full")


def blocks_per_unit(recompute: str) -> int | None:
    """Return N of recompute="every:N", and None where it is one of RECOMPUTE. Raises ValueError for anything else."""
    if found := re.fullmatch(r"every:([1-9]\d*)", recompute):
        return int(found[1])
    if recompute in RECOMPUTE:
        return None
    choices = f"{', '.join(RECOMPUTE)} or every:N, with N blocks a unit, 1 or more"
    near = difflib.get_close_matches(recompute, RECOMPUTE, 1)
    raise ValueError(
        f"recompute={recompute!r} is unknown; use {choices}" + (f"; did you mean {near[0]}?" if near else "")
    )


def check_data(config) -> None:
    """Raise ValueError where the sources of tokens, the vocabulary and the scale of lr do not fit each other."""
    if config.tokens is not None and config.text is not None:
        raise ValueError(f"tokens={config.tokens} is used in place of text={config.text}; use one of the two")
    vocab_size, reads_bytes = config.model.vocab_size, config.tokens is None and config.tokenizer is None
    if reads_bytes and vocab_size < 256:
        raise ValueError(f"vocab_size={vocab_size} does not hold every byte; use 256 or more")
    scale, reference = config.lr_scale, config.lr_batch_size
    if reference is not None and reference < 1:
        raise ValueError(f"lr_batch_size={reference} is out of range; use 1 or more")
    if (scale == "none") != (reference is None):
        raise ValueError(
            f"lr_scale={scale} with lr_batch_size={reference}: lr is scaled from the batch size it was found for; "
            "use both, lr_scale=linear or sqrt, or neither"
        )


def check_layout(config) -> None:
    """Raise ValueError where the mesh, the model and the batch of a TrainConfig do not fit each other."""
    Mesh(config.world_size, **config.mesh_sizes)
    _check_batch(config)
    check_slices(config)
    schedule = _check_stages(config)
    check_matrices(config)
    _check_replicas(config, schedule.copies)
    _check_reduction(config, schedule)
    _check_offload(config)
    _check_whole_matrices(config)
    _check_tokens(config)
    check_experts(config)
    _check_activations(config)
    _check_compile(config, schedule)


def _check_batch(config) -> None:
    require_divides("dp", config.dp, "batch_size", config.batch_size)
    samples = config.batch_size // config.dp
    require_divides("microbatches", config.microbatches, "a rank's samples (batch_size/dp)", samples)


def _check_stages(config) -> Schedule:
    schedule = schedule_of(config)
    layers = config.model.num_layers
    if schedule.model_stages > layers:
        raise ValueError(
            f"pp={config.pp} with schedule={config.schedule!r} has {schedule.model_stages} stages, "
            f"and num_layers={layers}; use at most {layers} stages"
        )
    return schedule


def _check_tokens(config) -> None:
    """Check how a sample's tokens are divided: over cp, and over tp under sequence parallelism."""
    _check_ulysses(config)
    whole = config.seq_len
    if config.cp > 1:
        whole = padded_length(config.seq_len, config.cp, config.cp_layout, config.cp_ulysses)
    if whole != config.seq_len:
        raise ValueError(
            f"cp={config.cp} with cp_layout={config.cp_layout!r} does not divide seq_len={config.seq_len}; "
            f"use seq_len={whole}"
        )
    layout = config.cp_layout, config.cp_attention, config.cp_ulysses
    check_context_parallel(config.model, config.cp, config.seq_len, *layout, tp=ranks_of_heads(config))
    if config.sequence_parallel:
        require_divides(
            "tp", config.tp, "a rank's tokens of a sample (seq_len/cp)", config.seq_len // config.cp
        )
    elif config.tp_chunked:
        raise ValueError(
            "tp_chunked=True cuts sequence_parallel's messages, and sequence_parallel=False; use both, or neither"
        )


def _check_ulysses(config) -> None:
    size, attention = config.cp_ulysses, config.cp_attention
    require_divides("cp_ulysses", size, "cp", config.cp)
    if attention != "usp" and size > 1:
        raise ValueError(
            f"cp_ulysses={size} is for cp_attention=usp, not {attention}; use that, or cp_ulysses=1"
        )
    if attention == "usp" and size == 1 and config.cp > 1:
        raise ValueError(
            f"cp_attention=usp with cp_ulysses=1 is a ring; use cp_ulysses={one_of(divisors(config.cp)[1:])}, "
            "or cp_attention=ring"
        )


def _check_reduction(config, schedule: Schedule) -> None:
    """Check the dtype in which gradients are summed, and that they may be reduced after every microbatch."""
    if config.reduce_dtype == "float16" and config.dtype != "float16":
        raise ValueError(
            f"reduce_dtype=float16 overflows without a loss scale, and dtype={config.dtype} has none; "
            "use dtype=float16, or reduce_dtype=bfloat16"
        )
    if config.reduce_every == "step":
        return
    if config.zero != 2:
        raise ValueError(
            f"reduce_every=microbatch is for zero=2, and zero={config.zero}; use zero=2, or step"
        )
    reasons = {
        "computes weight gradients apart": any(a.op == "W" for own in schedule.actions for a in own),
        "has several stages on a rank": schedule.num_stages > config.pp,
        "sums tied embeddings at the end of a step": config.model.tie_embeddings and config.pp > 1,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ValueError(
            f"reduce_every=microbatch needs every gradient after each backward, but schedule={config.schedule!r} on "
            f"pp={config.pp} {reason}; use reduce_every=step"
        )


def _check_offload(config) -> None:
    if config.offload != "none" and not config.zero:
        raise ValueError(
            f"offload={config.offload} is for the states that zero cuts, and zero=0; use zero=1, 2 or 3, on one rank too"
        )
    if config.offload_folder is not None and config.offload != "disk":
        raise ValueError(
            f"offload_folder={config.offload_folder} is for offload=disk, and offload={config.offload}; use that, or none"
        )


def _check_whole_matrices(config) -> None:
    if config.optimizer != "muon":
        return
    if config.tp > 1:
        raise ValueError(
            f"optimizer=muon needs whole matrices, and tp={config.tp} cuts them; use tp=1, or adamw"
        )
    if config.zero == 3:
        raise ValueError(
            "optimizer=muon needs whole matrices, and zero=3 cuts them; use zero=1 or 2, which give each matrix to a rank"
        )


def _check_replicas(config, copies: int) -> None:
    """Check hybrid sharding: the ranks that have the same parameters are `replicate` groups of equal size."""
    if config.replicate == 1:
        return
    if config.zero != 3:
        raise ValueError(
            f"replicate={config.replicate} copies the shards of zero=3, and zero={config.zero}; use zero=3"
        )
    data, times = config.dp * config.cp * copies, "*2" * (copies == 2)
    require_divides("replicate", config.replicate, f"dp*cp{times}", data)
    if config.model.num_experts:
        require_divides(
            "replicate", config.replicate, f"an expert's ranks (dp*cp{times}/ep)", data // config.ep
        )


def _check_activations(config) -> None:
    every = blocks_per_unit(config.recompute)
    if not config.partition_activations:
        return
    if config.recompute != "full" and every is None:
        raise ValueError(
            f"partition_activations cuts the inputs that recompute=full keeps, and recompute={config.recompute}; "
            "use recompute=full or every:N"
        )
    if config.sequence_parallel:
        raise ValueError(
            "partition_activations: with sequence_parallel a rank keeps only its part of these inputs anyway; "
            "use one of the two"
        )


def _check_compile(config, schedule: Schedule) -> None:
    """Check that a block is one graph: messages, host reads and deferred products would break it, or be traced once."""
    if config.compile == "none":
        return
    reasons = {
        f"tp={config.tp} sends messages": config.tp > 1,
        f"cp={config.cp} sends messages": config.cp > 1,
        "experts read their numbers of rows": config.model.num_experts > 0,
        "zero=3 swaps the weights": config.zero == 3,
        f"recompute={config.recompute} runs a block again": config.recompute != "none",
        "offload_activations moves what is saved": config.offload_activations,
        f"schedule={config.schedule} defers products": any(
            a.op == "W" for own in schedule.actions for a in own
        ),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ValueError(
            f"compile={config.compile} makes one graph of a block, and in it {reason}; use compile=none, or only dp, "
            "pp with a schedule without W, and zero=0, 1 or 2"
        )
