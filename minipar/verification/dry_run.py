"""A dry run: the program of every rank of a mesh, without numbers and without messages; then the programs are compared.

Each rank runs the recipe and two steps of the trainer, the same code as in a run, on tensors without contents
(`dry_tensors.py`) over a transport that records (`transport/dry.py`). Then `transport/matching.py` executes the records
against each other. So a mesh that would wait for ever, or needs more memory than a device has, is found without any device.

Not run: reading checkpoints and writing them, measuring held-out loss, and the text sample at the end.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.cost.machines import MACHINES
from minipar.cost.memory import rank_memory
from minipar.cost.traffic import step_traffic
from minipar.data.text import Text, load_data
from minipar.mesh import Mesh
from minipar.mesh.mesh import Coordinates
from minipar.train.parallelize import RankState, parallelize
from minipar.train.planned import job_and_layout, not_weighed
from minipar.train.step import train_step
from minipar.transport.dry import Contents, Program, RecordedTransport, Refused
from minipar.transport.matching import disagreements
from minipar.transport.turns import Stuck, Turns
from minipar.verification.dry_tensors import AllRanks, DryTensors, tensors_without_contents

# The groups of ranks over which a rank's bytes are counted.
COMMS = {"tp": ("tp",), "pp": ("pp",), "cp": ("cp",), "ep": ("ep",), "dp": ("dp", "cp"), "edp": ("edp",)}
STEPS = 2  # the second is like all that follow: in the first, states are made and stages tell each other their shapes


class Holding(NamedTuple):
    """Bytes that a rank holds after a step, and at the worst moment of the second step.

    parameters, gradients, states   storages, each counted once
    rest  whatever else is alive between two steps: buffers, copies in another dtype, the batch
    """

    parameters: int
    gradients: int
    states: int
    rest: int
    peak: int


class DryRank(NamedTuple):
    """What one rank holds and sends.

    sent        bytes sent in the second step, by axis of the mesh
    by_kind     bytes sent in the second step, by kind of operation
    sent_bytes, messages   all bytes and messages of the second step; those of all ranks' Comm belong to no axis
    """

    coordinates: Coordinates
    holding: Holding
    sent: dict[str, int]
    by_kind: Counter[str]
    sent_bytes: int
    messages: int


T = TypeVar("T")


class DryPrograms(NamedTuple, Generic[T]):
    """The programs of all ranks, their results by rank (of those that ended), and what is wrong with them, in words."""

    programs: list[Program]
    results: dict[int, T]
    faults: list[str]
    assumed: list[str]


class Comparison(NamedTuple):
    """A number of the planner's, and the dry run's, for the ranks with one pp coordinate."""

    pp: int
    what: str
    planned: float
    found: float


@dataclass
class DryRun:
    """The result of `dry_run`.

    ranks        rank -> what it holds and sends, of the ranks whose programs ended
    programs     every rank's program, with each message
    faults       in words: what would wait for ever, or be received by the wrong rank; the first explains the most
    assumed      in words: what the dry run took for granted, as it has no numbers
    compared     the planner's figures beside those found, where its formulas hold
    not_planned  options that the planner's formulas leave out
    memory_bytes a device's memory, or None
    """

    config: TrainConfig
    ranks: dict[int, DryRank]
    programs: list[Program]
    faults: list[str]
    assumed: list[str]
    compared: list[Comparison]
    not_planned: list[str]
    memory_bytes: float | None = None

    @property
    def over_memory(self) -> list[int]:
        """The ranks whose peak exceeds a device's memory."""
        limit = self.memory_bytes
        return [i for i, rank in self.ranks.items() if limit is not None and rank.holding.peak > limit]

    @property
    def works(self) -> bool:
        return not self.faults and not self.over_memory


def dry_run(config: TrainConfig, memory_gb: float | None = None) -> DryRun:
    """Run every rank's program of this configuration without numbers, and compare what the ranks would send each other.

    memory_gb  a device's memory, in 1e9 bytes; None: not compared

    Takes a second or so per rank, and the memory of the batch: no parameter and no activation is in memory.
    Raises ValueError for a text that is unreadable, memory_gb of 0 or less, and an option whose program decides by numbers
    that only a real run has.
    """
    if memory_gb is not None and not memory_gb > 0:
        raise ValueError(f"memory={memory_gb:g} is out of range; use a device's memory in GB, above 0")
    text, _ = load_data(config)
    done = run_ranks(config.world_size, partial(_rank, config, text))
    compared = [] if done.faults else compare(config, done.results)
    memory_bytes = None if memory_gb is None else memory_gb * 1e9
    return DryRun(
        config,
        done.results,
        done.programs,
        done.faults,
        [*done.assumed, *_left_out(config)],
        compared,
        not_weighed(config),
        memory_bytes,
    )


def _left_out(config: TrainConfig) -> list[str]:
    """Return in words what the dry run does otherwise than the run would."""
    found = []
    if config.offload != "none" or config.offload_activations:
        found.append("what is offloaded is counted as if it stayed in the device's memory")
    if config.compile != "none":
        found.append("blocks are not compiled")
    return found


# A rank's program: called with its world, and the mode that counts the bytes of its tensors.
RankProgram = Callable[[Comm, DryTensors], T]


def run_ranks(size: int, program: RankProgram[T]) -> DryPrograms[T]:
    """Run `program(world, tensors)` for each of `size` ranks, one at a time, without numbers and without messages.

    Raises Refused if a program decides by numbers that only a real run has.
    """
    turns, members = Turns(), tuple(range(size))
    contents = Contents(turns.wait_until)
    programs = [Program(i) for i in range(size)]
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}
    assumed: set[str] = set()

    def run(i: int) -> None:
        with tensors_without_contents(shared) as tensors:
            transport = RecordedTransport(members, i, contents, tensors.has_contents, tensors.forget_contents)
            programs[i] = transport.program
            try:
                results[i] = program(Comm(transport, members, "world"), tensors)
                transport.program.ended = True
            except Stuck:
                pass
            except Exception as error:
                errors[i] = error
            transport.recording = False
            assumed.update(tensors.assumed)

    with AllRanks() as shared:
        turns.run([partial(run, i) for i in range(size)])
    for error in errors.values():
        if isinstance(error, Refused):
            raise error
    faults = [f"rank {i} raises {_one_line(error)}" for i, error in sorted(errors.items())]
    results = dict(sorted(results.items()))
    return DryPrograms(programs, results, [*faults, *disagreements(programs)], sorted(assumed))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300)}"


def _rank(config: TrainConfig, text: Text, world: Comm, tensors: DryTensors) -> DryRank:
    """Run one rank, as `train/trainer.py` does, and measure it."""
    torch.manual_seed(config.seed)
    mesh = Mesh(world, config.pp, config.dp, config.cp, config.tp, config.ep)
    state = parallelize(config, mesh, world.device)
    comms = {axis: mesh.comm(*axes) for axis, axes in COMMS.items()}
    for step in range(STEPS):
        for comm in (world, *comms.values()):
            comm.traffic.reset()
        tensors.peak = tensors.now
        train_step(world, state, config, text, step)
    sent = {axis: comm.traffic.sent_bytes for axis, comm in comms.items()}
    traffic = world.traffic
    return DryRank(
        mesh.coordinates,
        _holding(state, tensors),
        sent,
        traffic.by_kind,
        traffic.sent_bytes,
        traffic.messages,
    )


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


def compare(config: TrainConfig, ranks: dict[int, DryRank]) -> list[Comparison]:
    """Compare the first rank of each pipeline rank with the planner's formulas for its memory and its bytes sent."""
    try:
        job, layout = job_and_layout(config, MACHINES["h100"])
    except ValueError:  # latent attention has no formulas
        return []
    if layout.pp != config.pp:  # two copies of a model are planned as another mesh
        return []
    found: list[Comparison] = []
    for pp in range(config.pp):
        rank = next(rank for rank in ranks.values() if rank.coordinates.pp == pp)
        memory, held = rank_memory(job, layout, pp), rank.holding
        total = sum(memory.values()) - memory["context"]  # a CPU has no libraries of a GPU
        found += [
            Comparison(pp, "parameters", memory["parameters"], held.parameters),
            Comparison(pp, "gradients", memory["gradients"], held.gradients),
            Comparison(pp, "optimizer state", memory["optimizer state"], held.states),
            Comparison(pp, "peak", total, held.peak),
        ]
        for axis, sent in step_traffic(job, layout, pp).items():
            if sent.total or rank.sent[axis]:
                found.append(Comparison(pp, f"sent over {axis}", sent.total, rank.sent[axis]))
    return found
