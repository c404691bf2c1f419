"""Elastic runs, which continue on another mesh when the number of ranks changes.

When a node is lost, `torchrun --nnodes MIN:MAX --max-restarts R` restarts the remaining ranks, in a smaller world. With
`--membership elastic` they continue from the newest complete checkpoint in the run's folder. The model, the batch, the seed
and the optimizer stay the same, and so do the losses. If the mesh given by the flags has as many ranks as the new world, it
is kept. Otherwise a mesh is chosen:

    1. Legal meshes are those with the world's number of ranks that the model and the batch allow. A microbatch has at most
       as many samples as the flags say. An option that does not fit the mesh, such as replicate, takes its default.
    2. Of the legal meshes that are predicted to fit in memory, the one with the shortest predicted step is chosen.
    3. If none fits, the same meshes are tried with a higher ZeRO stage and with full recomputation. If none of these fits,
       the one that needs the least memory is chosen.
    4. If no mesh of that many ranks is legal, the largest number of ranks with a legal mesh is used. The unused ranks wait
       until the run ends.

The node that torchrun's endpoint names must not be lost, because it runs the rendezvous.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch

from minipar.comm import Comm
from minipar.comm.host import on_host
from minipar.config.check_paths import CHECKPOINTS
from minipar.config.train_config import AXES, TrainConfig
from minipar.cost import MACHINES, Machine, find_machine, worst_rank_memory
from minipar.cost.machines import LOCAL
from minipar.cost.timing import step_time
from minipar.runtime.launch import MAX_TIMEOUT_S
from minipar.support.environment import ranks_per_node
from minipar.support.errors import Stopped, divisors
from minipar.train.checkpoint.restore import checkpoints, decided_on_rank_0
from minipar.train.planned import job_and_layout, not_weighed

T = TypeVar("T")

ASSUMED = Machine(
    "a CPU, assumed", peak_flops=5e10, matmul_fraction=0.8, memory_bytes=4e9, hbm_bytes_per_s=1e10, gpus_per_node=8,
    link_bytes_per_s=2e9, cards_per_node=1, card_bytes_per_s=1.25e9, link_latency_s=5e-5, network_latency_s=1e-4,
    start_latency_s=5e-5, share=1.0, float32_slowdown=1.0, context_bytes=3e8,
    source="ranks on cores, 10 Gb/s between nodes: an assumption",
)  # fmt: skip
# Options of the mesh that are not legal on every mesh, with their defaults.
DEFAULTS = {
    f.name: f.default
    for f in fields(TrainConfig)
    if f.metadata.get("group") == "mesh" and f.name not in (*AXES, "zero", "pad_vocab", "algorithm")
}


class MeshChoice(NamedTuple):
    """A configuration on one mesh, and the predictions for it.

    seconds    time of a step
    num_bytes  memory of the rank that needs most
    fits       whether that fits in the machine's memory
    of         number of legal meshes with the same number of ranks
    """

    config: TrainConfig
    seconds: float
    num_bytes: float
    fits: bool
    of: int


# Choosing, by arithmetic alone ----------------------------------------------------------------------------------------


def mesh_for(config: TrainConfig, world_size: int, machine: Machine = ASSUMED) -> MeshChoice:
    """Choose a mesh of at most `world_size` ranks for the run `config`, by the rules in the module's docstring.

    The choice depends only on the arguments, so any rank would choose the same mesh. A mesh of one rank is always legal.
    """
    meshes = next(found for n in range(world_size, 0, -1) if (found := list(legal_meshes(config, n))))
    weighed = [evaluate(mesh, machine, len(meshes)) for mesh in meshes]
    if not any(choice.fits for choice in weighed):
        weighed += [evaluate(smaller, machine, len(meshes)) for mesh in meshes for smaller in _smaller(mesh)]
    fitting = [choice for choice in weighed if choice.fits]
    return min(fitting, key=_by_time) if fitting else min(weighed, key=lambda choice: choice.num_bytes)


def legal_meshes(config: TrainConfig, world_size: int) -> Iterator[TrainConfig]:
    """Yield the configuration on every legal mesh of `world_size` ranks."""
    largest = max(n // m for n, m in zip(config.dp_samples, config.dp_microbatches))
    for pp, dp, cp in product(divisors(world_size), repeat=3):
        if world_size % (pp * dp * cp) or config.batch_size % dp:
            continue
        samples, tp = config.batch_size // dp, world_size // (pp * dp * cp)
        microbatches = next(m for m in divisors(samples) if samples // m <= largest)
        for ep in divisors(dp * cp) if config.model.num_experts else (1,):
            axes = dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, microbatches=microbatches)
            mesh = _legal(config, axes) or _legal(config, axes | defaults(config))
            if mesh is not None:
                yield mesh


def defaults(config: TrainConfig) -> dict[str, Any]:
    """Return DEFAULTS, and `options` without the options of the fields that DEFAULTS resets."""
    kept = {name: own for name, own in config.options.items() if name not in DEFAULTS}
    return DEFAULTS | {"options": kept}


def _legal(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig | None:
    try:
        return replace(config, **changes)
    except ValueError:
        return None


def _smaller(config: TrainConfig) -> Iterator[TrainConfig]:
    """Yield the configuration with every higher ZeRO stage, with full recomputation, and with both."""
    for zero, recompute in product(range(config.zero, 4), {config.recompute: None, "full": None}):
        reduce_every = config.reduce_every if zero == config.zero else "step"
        changed = _legal(config, dict(zero=zero, recompute=recompute, reduce_every=reduce_every))
        if changed is not None and changed != config:
            yield changed


def evaluate(config: TrainConfig, machine: Machine, of: int = 1) -> MeshChoice:
    """Predict a configuration's time and memory. `of` is the number of legal meshes, for `MeshChoice`."""
    job, layout = job_and_layout(config, machine)
    _, items = worst_rank_memory(job, layout)
    num_bytes = sum(items.values())
    return MeshChoice(config, step_time(job, layout).total, num_bytes, num_bytes <= machine.memory_bytes, of)


def _by_time(choice: MeshChoice) -> tuple[float, ...]:
    """Return a sort key: seconds rounded to four digits, as in the planner, then bytes, then the sizes of the axes."""
    return float(f"{choice.seconds:.4g}"), choice.num_bytes, *choice.config.mesh_sizes.values()


# On the ranks ---------------------------------------------------------------------------------------------------------


def train_on_ranks_there_are(
    config: TrainConfig, world: Comm | None, train: Callable[[TrainConfig, Comm], T]
) -> T | None:
    """Choose a mesh for this world; on the ranks of that mesh, call train(config, comm) and return its result.

    An unused rank waits until the run ends, and returns None. Raises ValueError if torchrun did not start this process.
    """
    if world is None:
        raise ValueError(
            "membership=elastic is for torchrun's ranks, and torchrun has not started this; use torchrun --nnodes MIN:MAX "
            "-m minipar train, or leave it out"
        )
    config = fit(config, world)
    if config.world_size == world.size:
        return train(config, world)
    # Unused ranks must not end before the run does: when all ranks of a node end, torchrun considers the run finished.
    everyone = on_host(Comm.from_process_group(timeout_s=MAX_TIMEOUT_S))
    if world.rank >= config.world_size:
        everyone.recv((1,), torch.uint8, 0).item()
        return None
    unused = range(config.world_size, world.size) if world.rank == 0 else ()

    def release() -> None:
        for rank in unused:
            everyone.send(torch.zeros(1, dtype=torch.uint8, device=everyone.device), rank)

    try:
        result = train(config, world.subgroup(range(config.world_size), "in use"))
    except Stopped:  # a signal has ended the run, which is saved
        release()
        raise
    release()
    return result


def fit(config: TrainConfig, world: Comm) -> TrainConfig:
    """Return the configuration for this world. Rank 0 chooses the mesh; checkpoints stay in the same folder."""
    folder = config.folder
    own = config.resume is None or decided_on_rank_0(world, partial(checkpoints, folder / CHECKPOINTS))
    config = replace(config, out=folder, resume=folder if own else config.resume)
    if world.size == config.world_size:
        return config
    chosen: TrainConfig = decided_on_rank_0(world, partial(_choose, config, world.size))
    return chosen


def _choose(config: TrainConfig, world_size: int) -> TrainConfig:
    machine = machine_here()
    choice = mesh_for(config, world_size, machine)
    print(reason(config, world_size, machine, choice), file=sys.stderr)
    return choice.config


def reason(config: TrainConfig, world_size: int, machine: Machine, choice: MeshChoice) -> str:
    """Return a line that says which mesh was chosen, and why."""
    mesh = choice.config
    changed = [f"{name}={getattr(mesh, name)}" for name in ("microbatches", "zero", "recompute", *DEFAULTS)
               if getattr(mesh, name) != getattr(config, name)]  # fmt: skip
    spare, left_out = world_size - mesh.world_size, dict.fromkeys((*not_weighed(config), *not_weighed(mesh)))
    return "".join([
        f"elastic: {world_size} ranks, and {config.mesh_name} needs {config.world_size}: going on with {mesh.mesh_name}",
        f" ({', '.join(changed)})" if changed else "",
        f", the {'fastest' if choice.fits else 'smallest'} of {choice.of} legal meshes" if choice.of > 1
        else ", the only legal mesh",
        f" (by the planner, {choice.seconds:.3g} s a step on {machine.name})",
        "" if choice.fits else f", though its {choice.num_bytes / 1e9:.3g} GB a rank may not fit",
        f"; not weighed: {', '.join(left_out)}" if left_out else "",
        f"; {spare} of the ranks {'is' if spare == 1 else 'are'} left over" if spare else "",
    ])  # fmt: skip


def machine_here() -> Machine:
    """Return the machine to plan for: that of local.toml if it exists, else by the GPU's name, else ASSUMED."""
    machine, own = ASSUMED, ranks_per_node()
    if LOCAL.exists():
        machine = find_machine(str(LOCAL))
    elif torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower()
        machine = next((m for key, m in MACHINES.items() if key.split("-")[0] in name), ASSUMED)
    if machine is ASSUMED:
        machine = replace(
            machine, memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / own
        )
    return replace(machine, gpus_per_node=own)
