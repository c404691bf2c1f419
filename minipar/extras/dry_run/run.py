"""A dry run: run the program of every rank of a mesh without tensor values or messages, then compare the programs.

Each rank parallelizes the model (`train/parallelize.py`) and runs two steps of the trainer. The code is that of a run, but
the tensors have no values (`tensors.py`), and the transport only records (`transport.py`). Then `matching.py` matches the
records. So a message that nobody receives, or a rank that needs more memory than a device has, is found without any device.

Two ranks are of one kind if their coordinates differ only along axes on which all ranks run the same program. Above 64
ranks, or if asked, only the first rank of each kind is run, and the others are taken to be like it.

Not run: reading and writing checkpoints, measuring held-out loss, and the text sample at the end.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.extras.dry_run.programs import run_ranks
from minipar.extras.dry_run.record import Program
from minipar.extras.dry_run.tensors import DryTensors
from minipar.mesh import Mesh
from minipar.mesh.mesh import Coordinates
from minipar.support.environment import MAX_RANKS
from minipar.train.data.text import Text, load_data
from minipar.train.parallelize import RankState, parallelize
from minipar.train.step import train_step

# Name in the report -> the axes of the Comm whose bytes are counted under it.
COMMS = {"tp": ("tp",), "pp": ("pp",), "cp": ("cp",), "ep": ("ep",), "dp": ("dp", "cp"), "edp": ("edp",)}
STEPS = 2  # the second is like all later steps; the first also makes optimizer states, and stages exchange their shapes


class Holding(NamedTuple):
    """Bytes that a rank holds after the second step, and at the peak of that step.

    parameters, gradients, states   bytes of their storages; a shared storage is counted once
    rest  all else that is alive between two steps: buffers, copies in another dtype, the batch
    """

    parameters: int
    gradients: int
    states: int
    rest: int
    peak: int


class DryRank(NamedTuple):
    """The bytes that one rank holds, and those that it sends.

    sent      bytes sent in the second step, by axis of the mesh; those over the world Comm are under none
    messages  all messages sent in the second step
    """

    coordinates: Coordinates
    holding: Holding
    sent: dict[str, int]
    messages: int


@dataclass
class DryRun:
    """The result of `dry_run`.

    ranks        rank -> what it holds and sends, for the ranks whose programs ended
    programs     the recorded program of every rank that was run
    faults       sentences that say why the run would fail; the first explains the most
    assumed      the assumptions about tensor values, and the parts of a run that a dry run leaves out
    memory_bytes a device's memory, or None
    """

    config: TrainConfig
    ranks: dict[int, DryRank]
    programs: list[Program]
    faults: list[str]
    assumed: list[str]
    memory_bytes: float | None = None

    @property
    def num_messages(self) -> int:
        """The number of messages that the ranks that were run send each other."""
        return sum(1 for program in self.programs for _ in program.messages())

    @property
    def over_memory(self) -> list[int]:
        """The ranks whose peak exceeds a device's memory."""
        limit = self.memory_bytes
        return [i for i, rank in self.ranks.items() if limit is not None and rank.holding.peak > limit]

    @property
    def works(self) -> bool:
        return not self.faults and not self.over_memory


def dry_run(config: TrainConfig, memory_gb: float | None = None, by_kind: bool | None = None) -> DryRun:
    """Run every rank's program of this configuration without tensor values, and check that their messages match.

    memory_gb  a device's memory, in 1e9 bytes; None: peaks are not compared with a memory size
    by_kind    run only the first rank of each kind; None: do so above 64 ranks

    Takes half a second or more per rank that is run, and the memory of the batch: parameters and activations take none.
    Raises ValueError for a text that is unreadable, memory_gb of 0 or less, and an option whose program reads tensor values
    that only a real run has.
    """
    if memory_gb is not None and not memory_gb > 0:
        raise ValueError(f"memory={memory_gb:g} is out of range; use a device's memory in GB, above 0")
    if config.layer_costs == "measured":
        raise ValueError("layer_costs=measured times layers, and a dry run computes nothing; leave it out")
    text, _ = load_data(config)
    by_kind = config.world_size > MAX_RANKS if by_kind is None else by_kind
    mesh = Mesh(config.world_size, **config.mesh_sizes)
    first = _first_of_kind(mesh, alike_axes(config) if by_kind else [])
    programs, of_kind, faults, assumed = run_ranks(mesh.world_size, partial(_rank, config, text), first)
    ranks = {
        rank: of_kind[one]._replace(coordinates=mesh.coordinates_of(rank))
        for rank, one in enumerate(first)
        if one in of_kind
    }
    return DryRun(
        config,
        ranks,
        programs,
        faults,
        [*assumed, *_left_out(config)],
        None if memory_gb is None else memory_gb * 1e9,
    )


def alike_axes(config: TrainConfig) -> list[str]:
    """Return the axes along which all ranks run the same program: dp and tp, unless an option gives ranks different work.

    Along cp, ranks have different parts of the causal mask, so that they hold different bytes.
    """
    different = {
        "tp": config.tp_layout != "1d",  # in a grid, some ranks exchange their blocks and others do not
        "dp": config.dp_speeds is not None
        or config.optimizer != "adamw"
        or config.compress != "none"
        or config.dispatch != "all-to-all",
    }
    return [axis for axis, differs in different.items() if not differs]


def _first_of_kind(mesh: Mesh, alike: list[str]) -> list[int]:
    """Return the first rank of each rank's kind: the one with coordinate 0 along the axes `alike`."""
    return [
        rank - sum(getattr(mesh.coordinates_of(rank), axis) * mesh.stride(axis) for axis in alike)
        for rank in range(mesh.world_size)
    ]


def _left_out(config: TrainConfig) -> list[str]:
    """Return in words where the dry run differs from the run."""
    found = []
    if config.offload != "none" or config.offload_activations:
        found.append("what is offloaded is counted as if it were in the device's memory")
    if config.compile != "none":
        found.append("blocks are not compiled")
    return found


def _rank(config: TrainConfig, text: Text, world: Comm, tensors: DryTensors) -> DryRank:
    """Run one rank as `train/trainer.py` does, and measure what it holds and sends."""
    torch.manual_seed(config.seed)
    mesh = Mesh(world, **config.mesh_sizes)
    state = parallelize(config, mesh, world.device)
    gc.collect()  # the whole model that told the costs of its layers: on the meta device, it takes no memory in a run
    comms = {axis: mesh.comm(*axes) for axis, axes in COMMS.items()}
    for step in range(STEPS):
        for comm in (world, *comms.values()):
            comm.traffic.reset()
        tensors.peak = tensors.now
        train_step(world, state, config, text, step)
    sent = {axis: comm.traffic.sent_bytes for axis, comm in comms.items()}
    return DryRank(mesh.coordinates, _holding(state, tensors), sent, world.traffic.messages)


def _holding(state: RankState, tensors: DryTensors) -> Holding:
    parameters = [p for stage in state.stages for p in stage.parameters()]
    updated = state.optimizer.tensors
    gradients = [p.grad for p in (*parameters, *updated) if p.grad is not None]
    masters = [(x, slots) for x, slots in state.optimizer.tensors_and_states()]
    states = [x for x, _ in masters] + [v for _, slots in masters for v in slots.values()]
    counted: set[int] = set()
    p, g, s = (_storage_bytes(group, counted) for group in (parameters, gradients, states))
    return Holding(p, g, s, rest=tensors.now - p - g - s, peak=tensors.peak)


def _storage_bytes(tensors: list[Any], counted: set[int]) -> int:
    """Return the bytes of the tensors' storages, without those already counted."""
    total = 0
    for x in tensors:
        if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in counted:
            counted.add(x.untyped_storage()._cdata)
            total += x.untyped_storage().nbytes()
    return total
