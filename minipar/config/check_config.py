"""Checks before any rank starts. Settings that do not fit raise a ValueError with the reason and a value that works."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from minipar.config.check_experts import check_experts
from minipar.config.context_limits import (
    check_context_parallel,
    length_multiple,
    padded_length,
    ulysses_ranks,
    why_length_illegal,
    why_usp_illegal,
)
from minipar.config.mesh_rules import check_mesh, why_batch_illegal, why_stages_illegal
from minipar.config.tensor_limits import why_tokens_uneven
from minipar.schedules import Schedule
from minipar.schedules.registry import make_schedule
from minipar.support.errors import divisors, one_of, require_divides

if TYPE_CHECKING:
    from minipar.config.train_config import TrainConfig

RECOMPUTE = ("none", "selective", "full")


def blocks_per_unit(recompute: str) -> int | None:
    """Return N for recompute="every:N", or None for one of RECOMPUTE. Raises ValueError for anything else."""
    if found := re.fullmatch(r"every:([1-9]\d*)", recompute):
        return int(found[1])
    if recompute in RECOMPUTE:
        return None
    choices = f"{', '.join(RECOMPUTE)} or every:N, with N blocks a unit, 1 or more"
    near = difflib.get_close_matches(recompute, RECOMPUTE, 1)
    raise ValueError(
        f"recompute={recompute!r} is unknown; use {choices}" + (f"; did you mean {near[0]}?" if near else "")
    )


def schedule_of(config: TrainConfig, dp_rank: int = 0) -> Schedule:
    """Return the schedule of a dp rank's pipeline. With `dp_speeds`, dp ranks may run different numbers of microbatches."""
    arguments = tuple(sorted(config.choice("schedule").arguments(config).items()))
    microbatches = config.dp_microbatches[dp_rank]
    return _schedule(config.schedule, config.pp, microbatches, config.chunks, arguments)


@lru_cache(maxsize=16)  # a search over meshes asks for the same schedule once per mesh
def _schedule(
    name: str, p: int, m: int, chunks: int | None, arguments: tuple[tuple[str, Any], ...]
) -> Schedule:
    return make_schedule(name, p, m, chunks, **dict(arguments))


def check_data(config: TrainConfig) -> None:
    """Raise ValueError for tokens beside text, a vocabulary too small for bytes, or a scaling of lr given in half."""
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


def check_layout(config: TrainConfig) -> None:
    """Raise ValueError if the mesh, the model and the batch of a TrainConfig do not fit each other."""
    check_mesh(config.world_size, config.pp, config.dp, config.cp, config.tp, config.ep)
    _check_batch(config)
    schedule = _check_stages(config)
    _check_replicas(config)
    _check_reduction(config, schedule)
    _check_tokens(config)
    check_experts(config)
    _check_activations(config)
    _check_compile(config, schedule)


def _check_batch(config: TrainConfig) -> None:
    """Check that every dp rank gets samples, and the same number in each of its microbatches."""
    speeds, m = config.dp_speeds, config.microbatches
    if speeds is not None:
        _check_speeds(config, speeds)
    if speeds is not None and config.equal_microbatches:
        require_divides("microbatches", m, "batch_size", config.batch_size)
        if config.batch_size // m < config.dp:
            raise ValueError(
                f"batch_size={config.batch_size} in {m} microbatches leaves some of dp={config.dp} ranks without a sample; "
                f"use batch_size={config.dp * m} or more"
            )
    elif why := why_batch_illegal(config.batch_size, config.dp, m):
        samples = config.batch_size // config.dp
        fits = divisors(config.batch_size if config.batch_size % config.dp else samples)
        raise ValueError(f"{why}; use {one_of(fits)}")


def _check_speeds(config: TrainConfig, speeds: tuple[float, ...]) -> None:
    if len(speeds) != config.dp or min(speeds) <= 0:
        raise ValueError(f"dp_speeds={list(speeds)} for dp={config.dp}; give a number above 0 per dp rank")
    if config.compress != "none":
        raise ValueError(
            f"compress={config.compress} averages dp ranks with equal parts of the batch, and dp_speeds gives them unequal "
            "ones; use one of the two"
        )


def _check_stages(config: TrainConfig) -> Schedule:
    schedules = [
        schedule_of(config, rank) for rank in range(config.dp)
    ]  # raises ValueError where one is impossible
    schedule = schedules[0]
    if why := why_stages_illegal(schedule.num_stages, config.model.num_layers, config.pp, config.schedule):
        raise ValueError(why)
    return schedule


def _check_tokens(config: TrainConfig) -> None:
    """Check that a sample's tokens can be divided over cp and, with sequence parallelism, over tp."""
    if why := why_usp_illegal(config.cp, config.cp_attention, config.cp_ulysses):
        raise ValueError(why)
    if why_length_illegal(config.seq_len, config.cp, config.cp_layout, config.cp_ulysses):
        how = config.cp, config.cp_layout, config.cp_ulysses
        fits = padded_length(config.seq_len, *how)
        if fits > config.model.max_seq_len:
            fits -= length_multiple(*how)
        raise ValueError(
            f"cp={config.cp} with cp_layout={config.cp_layout!r} does not divide seq_len={config.seq_len}; "
            + (
                f"use seq_len={fits}"
                if fits
                else f"use seq_len and model.max_seq_len={length_multiple(*how)}"
            )
        )
    layout = config.cp_layout, config.cp_attention, config.cp_ulysses
    heads = config.choice("tp_layout").ranks_of_heads(config)
    own = config.model.num_heads // heads
    over = ulysses_ranks(config.cp, config.cp_attention, config.cp_ulysses)
    if own % over:
        name = "cp" if config.cp_attention == "ulysses" else "cp_ulysses"
        works = [n for n in divisors(own) if name == "cp" or (n > 1 and config.cp % n == 0)]
        advice = f"{name}={one_of(works)}, or " if works else ""
        raise ValueError(
            f"{name}={over} does not divide num_heads{'' if heads == 1 else '/tp'}={own}; use {advice}cp_attention=ring"
        )
    check_context_parallel(config.model, config.cp, config.seq_len, *layout, tp=heads)
    if config.sequence_parallel:
        tokens = config.seq_len // config.cp
        if why := why_tokens_uneven(config.tp, tokens):
            raise ValueError(f"{why}; use {one_of(divisors(tokens))}")
    elif config.tp_chunked:
        raise ValueError(
            "tp_chunked=True cuts sequence_parallel's messages, and sequence_parallel=False; use both, or neither"
        )


def _check_reduction(config: TrainConfig, schedule: Schedule) -> None:
    """Check the dtype in which gradients are summed, and how often they are reduced and parameters are gathered."""
    if config.reduce_dtype == "float16" and config.dtype != "float16":
        raise ValueError(
            f"reduce_dtype=float16 overflows without a loss scale, and dtype={config.dtype} has none; "
            "use dtype=float16, or reduce_dtype=bfloat16"
        )
    if config.gather_every != "microbatch" and config.zero != 3:
        raise ValueError(
            f"gather_every={config.gather_every} is for zero=3, which alone gathers parameters, and zero={config.zero}; "
            "use zero=3, or leave it out"
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


def _check_replicas(config: TrainConfig) -> None:
    """Check hybrid sharding: the ranks that share parameters must form `replicate` groups of equal size."""
    if config.replicate == 1:
        return
    if config.zero != 3:
        raise ValueError(
            f"replicate={config.replicate} copies the shards of zero=3, and zero={config.zero}; use zero=3"
        )
    data = config.dp * config.cp
    require_divides("replicate", config.replicate, "dp*cp", data)
    if config.model.num_experts:
        require_divides("replicate", config.replicate, "an expert's ranks (dp*cp/ep)", data // config.ep)


def _check_activations(config: TrainConfig) -> None:
    every = blocks_per_unit(config.recompute)
    whole_blocks = config.recompute == "full" or every is not None
    if config.keep_messages and not whole_blocks:
        raise ValueError(
            f"keep_messages spares the messages of recomputed blocks, and recompute={config.recompute} recomputes none; "
            "use recompute=full or every:N"
        )
    if not config.partition_activations:
        return
    if not whole_blocks:
        raise ValueError(
            f"partition_activations cuts the inputs that recompute=full keeps, and recompute={config.recompute}; "
            "use recompute=full or every:N"
        )
    if config.sequence_parallel:
        raise ValueError(
            "partition_activations: with sequence_parallel a rank keeps only its part of these inputs anyway; "
            "use one of the two"
        )


def _check_compile(config: TrainConfig, schedule: Schedule) -> None:
    """Check that compile can make one graph of a block.

    Messages, host reads and deferred products would break the graph, or would run only while it is traced.
    """
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
