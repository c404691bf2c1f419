"""A run's job and layout for the planner, and the options that its predictions leave out. Imports no torch."""

from __future__ import annotations

from minipar.config.choices import CHOSEN
from minipar.config.train_config import TrainConfig
from minipar.cost import Implementation, Job, Layout, Machine, ModelShape
from minipar.cost.stages import FORMS, enough_microbatches
from minipar.schedules.registry import SCHEDULES, chunks_per_rank

# Options that change time or bytes but are in no formula, with their defaults. Options whose values are choices (such as
# `schedule`) are not listed: `not_weighed` asks each choice whether a formula includes it.
UNPRICED = {
    "dp_speeds": None,
    "gather_every": "microbatch",
    "layer_costs": "computed",
    "tp_chunked": False,
    "partition_activations": False,
    "keep_messages": False,
    "offload_activations": False,
    "compile": "none",
}


def job_and_layout(config: TrainConfig, machine: Machine) -> tuple[Job, Layout]:
    """Return the planner's job and layout for this configuration; `not_weighed` names the options that these leave out."""
    how = Implementation(
        attention="dense" if config.model.attention == "plain" else config.model.attention,
        sequence_parallel=config.sequence_parallel, reduce_every=config.reduce_every, replicate=config.replicate,
        reduce_bytes=_reduce_bytes(config),
        bucket_mb=config.bucket_mb, cp_ulysses=config.cp_ulysses, group_tokens=config.model.group_tokens,
    )  # fmt: skip
    precision = "mixed" if config.mixed_precision else config.dtype
    shape = ModelShape.of(config.model)
    job = Job(shape, machine, config.world_size, config.seq_len, config.batch_size, precision, how)
    microbatch = max(1, config.batch_size // config.dp // config.microbatches)
    name, chunks = _planned_order(config)
    return job, Layout(
        config.dp, config.pp, config.cp, config.ep, config.tp, config.zero, name, chunks, microbatch, config.recompute,
        config.cp_attention,
    )  # fmt: skip


def _reduce_bytes(config: TrainConfig) -> int:
    """Return the bytes of a gradient while it is summed over ranks."""
    name = config.reduce_dtype or ("float32" if config.mixed_precision else config.dtype)
    return {"float64": 8, "float32": 4}.get(name, 2)


def _planned_order(config: TrainConfig) -> tuple[str, int]:
    """Return (schedule, chunks per rank) for the planner.

    A schedule without closed formulas, or with too few microbatches, is predicted as 1F1B.
    """
    name = config.choice("schedule").priced_as(config)
    if name not in FORMS or not enough_microbatches(name, config.pp, config.microbatches):
        return "1f1b", 1
    return name, chunks_per_rank(name, config.chunks if SCHEDULES[name].chunks is None else None)


def not_weighed(config: TrainConfig) -> list[str]:
    """Return the configuration's options that the planner leaves out, as name=value."""
    found = [_unpriced(config, name) for name in CHOSEN]
    found += [
        f"{name}={getattr(config, name)}"
        for name, default in UNPRICED.items()
        if getattr(config, name) != default
    ]
    priced = _planned_order(config)[0]
    if config.pp > 1 and priced != config.choice("schedule").priced_as(config):
        found.append(f"schedule={config.schedule} (as {priced})")
    return [left_out for left_out in found if left_out]


def _unpriced(config: TrainConfig, name: str) -> str:
    """Return what the planner leaves out of a choice, as name=value; "" if there is nothing."""
    option = config.choice(name).unpriced
    if not option:
        return "" if option is None else f"{name}={getattr(config, name)}"
    value = getattr(config.options.get(name), option, None)
    return "" if value is None else f"{name}.{option}={value}"
