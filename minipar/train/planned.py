"""A run as the planner sees it: its job and its layout, and the options that the predictions leave out."""

from __future__ import annotations

from dataclasses import fields

from minipar.cost import Implementation, Job, Layout, Machine, ModelShape
from minipar.cost.stages import PLANNED, enough_microbatches
from minipar.schedules.registry import LOOPED, TWO_DIRECTIONS, chunks_per_rank
from minipar.train.train_config import TrainConfig

# Options that change seconds or bytes and are not in the planner's formulas, at their defaults.
UNPLANNED_OPTIONS = {
    f.name: f.default
    for f in fields(TrainConfig)
    if f.name in ("optimizer", "tp_layout", "tp_chunked", "ep_node_size", "ep_chunks", "ep_once_per_node", "ep_shadow",
                  "partition_activations", "offload_activations", "offload", "compile")
}  # fmt: skip
ONE_SLICE = {"terapipe": "gpipe", "seq1f1b": "1f1b"}


def job_and_layout(config: TrainConfig, machine: Machine) -> tuple[Job, Layout]:
    """Return the job and the layout that the configuration is to the planner; `not_weighed` names what these leave out."""
    m = config.model
    shape = ModelShape(
        "this model", m.num_layers, m.dim, m.num_heads, m.hidden_dim, m.vocab_size, m.num_kv_heads,
        tie_embeddings=m.tie_embeddings, dropout=m.dropout > 0, num_experts=m.num_experts, top_k=m.top_k,
        capacity_factor=m.capacity_factor or 1.0, moe_every=m.moe_every, shared_dim=m.shared_dim,
        parallel_block=m.parallel_block,
    )  # fmt: skip
    how = Implementation(
        attention="dense" if m.attention == "plain" else m.attention, sequence_parallel=config.sequence_parallel,
        reduce_every=config.reduce_every, replicate=config.replicate, cp_ulysses=config.cp_ulysses,
        group_tokens=m.group_tokens,
    )  # fmt: skip
    precision = "mixed" if config.mixed_precision else config.dtype
    job = Job(shape, machine, config.world_size, config.seq_len, config.batch_size, precision, how)
    microbatch = config.batch_size // config.dp // config.microbatches
    name, dp, pp, chunks = _planned_order(config)
    return job, Layout(
        dp, pp, config.cp, config.ep, config.tp, config.zero, name, chunks, microbatch, config.recompute,
        config.cp_attention, config.seq_slices,
    )  # fmt: skip


def _planned_order(config: TrainConfig) -> tuple[str, int, int, int]:
    """The schedule that is weighed, dp, pp and chunks a rank: two copies of a model are twice the dp of a V on half the pp.

    A schedule that the planner does not know, or that these microbatches do not fill, is 1F1B.
    """
    name, dp, pp, m = config.schedule, config.dp, config.pp, config.microbatches
    if config.seq_slices == 1:
        name = ONE_SLICE.get(name, name)
    if name in TWO_DIRECTIONS:
        name, dp, pp, m = "dualpipe-v", 2 * dp, pp // 2, m // 2
    if name not in PLANNED or not enough_microbatches(name, pp, m):
        return "1f1b", dp, pp, 1
    return name, dp, pp, chunks_per_rank(name, config.chunks if name in LOOPED else None)


def not_weighed(config: TrainConfig) -> list[str]:
    """Return the options of a configuration that its predictions leave out, as name=value."""
    found = [
        f"{name}={getattr(config, name)}"
        for name, default in UNPLANNED_OPTIONS.items()
        if getattr(config, name) != default
    ]
    weighed = _planned_order(config)[0]
    same = {config.schedule, {"dualpipe": "dualpipe-v"}.get(config.schedule), ONE_SLICE.get(config.schedule)}
    if config.pp > 1 and weighed not in same:
        found.append(f"schedule={config.schedule} (as {weighed})")
    return found
