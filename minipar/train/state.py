"""The state of a run, to a checkpoint and back: this rank's parts of parameters and optimizer state, and buffers.

Nothing else is state: the batch of a step, its dropout masks and its learning rate are functions of seed and step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from minipar.mesh import Placement, placement_of
from minipar.train.checkpoint import StoredPart
from minipar.train.parallelize import RankState
from minipar.train.restore import Checkpoint
from minipar.train.train_config import TrainConfig

PARAMETER, BUFFER = "parameter", "buffer"


def parts_of(state: RankState) -> tuple[list[StoredPart], dict[str, dict[str, float]]]:
    """Return this rank's parts, and the scalar optimizer state of its parameters: {name: {"step": 3.0}}."""
    parts, numbers = [], {}
    for x, own in state.optimizer.tensors_and_states():
        placement = placement_of(x)
        if placement.tied_to is not None:
            continue  # a copy: its original is stored
        if x.numel():  # under ZeRO some ranks hold no element of a parameter
            parts.append(StoredPart(PARAMETER, placement, x))
        for key, value in own.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if value.numel():
                    parts.append(StoredPart(key, placement, value))
            else:
                numbers.setdefault(placement.name, {})[key] = float(value)
    parts += [StoredPart(BUFFER, placement, buffer) for placement, buffer in buffers_of(state)]
    return parts, numbers


@torch.no_grad()
def restore(state: RankState, checkpoint: Checkpoint) -> None:
    """Load a checkpoint, written on any mesh, into this rank's state. Raises ValueError where something is missing."""
    for stage in state.stages:
        for param in stage.parameters():
            param.copy_(checkpoint.read(PARAMETER, _in_grid_order(placement_of(param))))
    for placement, buffer in buffers_of(state):
        buffer.copy_(checkpoint.read(BUFFER, placement))
    for x, own in state.optimizer.tensors_and_states():
        placement = _in_grid_order(placement_of(x))
        x.copy_(checkpoint.read(PARAMETER, placement))
        for key in sorted(checkpoint.kinds - {PARAMETER, BUFFER}):
            if checkpoint.has(key, placement.name):
                own[key] = checkpoint.read(key, placement).to(x.device)
        for key, value in checkpoint.extra["numbers"].get(placement.name, {}).items():
            own[key] = torch.tensor(value)


def described(config: TrainConfig, numbers: dict) -> dict:
    """The description of a run that its checkpoints store."""
    return {"seed": config.seed, "dtype": config.dtype, "model": asdict(config.model), "numbers": numbers}


def require_same_run(config: TrainConfig, checkpoint: Checkpoint) -> None:
    """Raise ValueError where the checkpoint is of another run, or has already done `config.steps` steps."""
    for name, ours in described(config, {}).items():
        theirs = checkpoint.extra[name]
        if name != "numbers" and theirs != ours:
            if name == "model":
                differ = [key for key in ours if ours[key] != theirs.get(key)]
                name, theirs, ours = differ[0], theirs.get(differ[0]), ours[differ[0]]
            raise ValueError(
                f"{name}={ours!r}, but {checkpoint.path} is of a run with {name}={theirs!r}; use that"
            )
    if checkpoint.step >= config.steps:
        raise ValueError(
            f"steps={config.steps}: {checkpoint.path} has done {checkpoint.step}; use more steps"
        )


def buffers_of(state: RankState) -> Iterator[tuple[Placement, torch.Tensor]]:
    """Yield this rank's buffers: the biases that balance experts, neither trained nor made from the seed, each whole."""
    for stage in state.stages:
        for name, buffer in stage.named_buffers():
            yield Placement.whole(name, buffer.shape), buffer


def _in_grid_order(placement: Placement) -> Placement:
    return placement if placement.tied_to is None else replace(placement, name=placement.tied_to)
