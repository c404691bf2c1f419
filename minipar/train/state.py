"""The state of a run, to a checkpoint and back: this rank's parts of parameters and optimizer state, and buffers.

Of a float16 model the loss scale too. Nothing else is state: the batch of a step, its dropout masks and its learning rate
are functions of seed and step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

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
    """Load a checkpoint, written on any mesh, into this rank's state. Raises ValueError where something is missing.

    Optimizer state takes the dtype of the tensor it belongs to: float32 where there are master weights, as of a model in
    half precision, else the parameter's.
    """
    parameters = [param for stage in state.stages for param in stage.parameters()]
    for param in parameters:
        param.copy_(checkpoint.read(PARAMETER, _original(placement_of(param))))
    for placement, buffer in buffers_of(state):
        buffer.copy_(checkpoint.read(BUFFER, placement))
    done, kinds = set(map(id, parameters)), sorted(checkpoint.kinds - {PARAMETER, BUFFER})
    for x, own in state.optimizer.tensors_and_states():
        placement = _original(placement_of(x))
        if id(x) not in done:
            x.copy_(checkpoint.read(PARAMETER, placement))
        for key in kinds:
            if checkpoint.has(key, placement.name):
                value = checkpoint.read(key, placement)
                own[key] = value.to(x.device, x.dtype if value.is_floating_point() else None)
        for key, value in checkpoint.extra["numbers"].get(placement.name, {}).items():
            own[key] = torch.tensor(value)
    if state.scaler is not None:
        state.scaler.load_state_dict(checkpoint.extra["loss_scaler"])


# What decides the numbers, with the model and the text. All other settings may differ, and are then said to.
ALIKE = ("seed", "dtype", "optimizer", "batch_size", "seq_len")
UNSAID = (
    "model", "moe", "text", "eval_every", "out", "name", "resume", "checkpoint_every", "keep", "verify_steps",
    "trace_steps", "timeout_s", "tensorboard", "peak_tflops",
)  # fmt: skip


def described(config: TrainConfig, numbers: dict | None = None, text_digest: str = "") -> dict:
    """The description of a run that its checkpoints store, text_digest from `text.digest_of`."""
    return {
        **{name: getattr(config, name) for name in ALIKE},
        "model": asdict(config.model),
        "text": text_digest,
        "held_out": bool(config.eval_every),
        "settings": _settings(config),
        "numbers": numbers or {},
    }


def require_same_run(config: TrainConfig, checkpoint: Checkpoint, text_digest: str) -> None:
    """Raise ValueError where the checkpoint is of another run, or has already done `config.steps` steps.

    Another run is one with another model, seed, precision, batch or text: its numbers could not go on from these.
    """
    theirs = checkpoint.extra
    ours = described(config, text_digest=text_digest)
    of = f"{checkpoint.path} is of a run"
    for name, value in [(name, ours[name]) for name in ALIKE] + list(ours["model"].items()):
        stored = theirs["model"].get(name) if name in ours["model"] else theirs[name]
        if stored != value:
            raise ValueError(f"{name}={value!r}, but {of} with {name}={stored!r}; use that")
    if theirs["held_out"] != ours["held_out"]:
        did, use = ("held out a part of", "above 0") if theirs["held_out"] else ("trained on all of", "0")
        raise ValueError(
            f"eval_every={config.eval_every}, but {of} that {did} its text; use eval_every={use}"
        )
    if theirs["text"] != ours["text"]:
        raise ValueError(f"text={config.text}, but {of} on a text with other bytes; use that text")
    if checkpoint.step >= config.steps:
        raise ValueError(
            f"steps={config.steps}: {checkpoint.path} has done {checkpoint.step}; use more steps"
        )


def changed_settings(config: TrainConfig, checkpoint: Checkpoint) -> str:
    """Name the settings changed since the checkpoint was written: "lr=0.1 (was 0.005), tp=4 (was 1)"; "" if nothing."""
    stored = checkpoint.extra["settings"]
    return ", ".join(
        f"{k}={v} (was {stored.get(k)})" for k, v in _settings(config).items() if stored.get(k) != v
    )


def _settings(config: TrainConfig) -> dict:
    """The settings of a configuration that may differ from run to run, its paths as text."""
    names = [field.name for field in fields(config) if field.name not in ALIKE + UNSAID]
    values = {name: getattr(config, name) for name in names}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def buffers_of(state: RankState) -> Iterator[tuple[Placement, torch.Tensor]]:
    """Yield this rank's buffers: the biases that balance experts, neither trained nor made from the seed, each whole."""
    for stage in state.stages:
        for name, buffer in stage.named_buffers():
            yield Placement.whole(name, buffer.shape), buffer


def _original(placement: Placement) -> Placement:
    """The placement under which the tensor is stored: a tied copy's is its original's."""
    return placement if placement.tied_to is None else replace(placement, name=placement.tied_to)
