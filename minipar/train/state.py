"""Save and restore the state of a run: this rank's parts of parameters and optimizer state, and buffers.

A float16 model's loss scale is also part of the state. Nothing else is: the batch of a step, its dropout masks and its
learning rate are functions of seed and step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Placement, placement_of
from minipar.train.checkpoint.restore import Checkpoint
from minipar.train.checkpoint.saver import StoredPart
from minipar.train.data.epoch import place_of_step
from minipar.train.data.text import NO_TEXT, TextId
from minipar.train.parallelize import RankState

PARAMETER, BUFFER = "parameter", "buffer"


def parts_of(state: RankState) -> tuple[list[StoredPart], dict[str, dict[str, float]]]:
    """Return this rank's parts, and the scalar optimizer state of its parameters: {name: {"step": 3.0}}."""
    parts: list[StoredPart] = []
    numbers: dict[str, dict[str, float]] = {}
    for x, own in state.optimizer.tensors_and_states():
        placement = placement_of(x)
        if placement.tied_to is not None:
            continue  # a tied copy: its original is stored
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
    """Load a checkpoint, written on any mesh, into this rank's state. Raises ValueError if something is missing.

    Optimizer state gets the dtype of the tensor that is updated: float32 for master weights, else the parameter's dtype.
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
    state.averaging.restore(state, checkpoint)


class StoredParameters(Mapping[str, torch.Tensor]):
    """Every parameter of a checkpoint by name, each read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype):
        self._checkpoint, self._dtype = checkpoint, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._checkpoint.global_shape(PARAMETER, name)
        return self._checkpoint.read(PARAMETER, Placement.whole(name, shape)).to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.names(PARAMETER))

    def __len__(self) -> int:
        return len(self._checkpoint.names(PARAMETER))


# Together with the model and the text, these settings decide a run's results. Others may change; changes are reported.
ALIKE = ("seed", "dtype", "optimizer", "batch_size", "seq_len", "sampling")
UNREPORTED_FIELDS = (
    "model", "moe", "text", "tokens", "tokenizer", "eval_every", "out", "name", "resume", "checkpoint_every", "keep",
    "verify_steps", "trace_steps", "timeout_s", "membership", "tensorboard", "peak_tflops",
    "init",
)  # fmt: skip


def described(
    config: TrainConfig,
    text_id: TextId = NO_TEXT,
    step: int = 0,
    numbers: dict[str, dict[str, float]] | None = None,
) -> dict[str, Any]:
    """Return a run's description for its checkpoints: all that determines its results, and its position in the text.

    numbers  the scalar optimizer state that `parts_of` returns
    """
    return {
        **{name: getattr(config, name) for name in ALIKE},
        "model": asdict(config.model),
        "text": text_id.digest,
        "codec": text_id.codec,
        "place": _place(config, text_id, step),
        "held_out": bool(config.eval_every),
        "settings": _settings(config),
        "numbers": numbers or {},
    }


def _place(config: TrainConfig, text_id: TextId, step: int) -> list[int] | None:
    """Return the epoch after `step` steps, and the number of its samples already used; None without epochs."""
    if config.sampling == "random" or not text_id.num_tokens:
        return None
    return [*place_of_step(text_id.num_tokens, step, config.batch_size, config.seq_len)]


def require_same_run(config: TrainConfig, checkpoint: Checkpoint, text_id: TextId) -> None:
    """Raise ValueError if the checkpoint is of another run, or has already done `config.steps` steps.

    A run with another model, seed, precision, batch or text is another run: it would not continue this run's results.
    """
    theirs = {"sampling": "random", "codec": "bytes", "place": None} | checkpoint.extra
    ours = described(config, text_id, checkpoint.step)
    of = f"{checkpoint.path} is of a run"
    # A field that is newer than the checkpoint has its default.
    model = {name: _as_json(value) for name, value in vars(ModelConfig(**theirs["model"])).items()}
    for name, value in [(name, ours[name]) for name in ALIKE] + list(ours["model"].items()):
        stored = model[name] if name in model else theirs[name]
        if stored != _as_json(value):
            raise ValueError(f"{name}={value!r}, but {of} with {name}={stored!r}; use that")
    config.choice("compress").require_resumable(config, theirs["settings"], of)
    if theirs["held_out"] != ours["held_out"]:
        did, use = ("held out a part of", "above 0") if theirs["held_out"] else ("trained on all of", "0")
        raise ValueError(
            f"eval_every={config.eval_every}, but {of} that {did} its text; use eval_every={use}"
        )
    if theirs["codec"] != ours["codec"]:
        raise ValueError(f"tokenizer={config.tokenizer}, but {of} with another one, or none; use that")
    if theirs["text"] != ours["text"]:
        name = "text" if config.tokens is None else "tokens"
        raise ValueError(
            f"{name}={getattr(config, name)}, but {of} on a text with other bytes; use that text"
        )
    if theirs["place"] != ours["place"]:
        raise ValueError(
            f"step {checkpoint.step} is at {ours['place']} (epoch, samples of it), but {of} at {theirs['place']}: "
            "its samples were cut otherwise; use the text and the version that it was trained with"
        )
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


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that may change when a run is resumed, paths as text."""
    names = [field.name for field in fields(config) if field.name not in ALIKE + UNREPORTED_FIELDS]
    values = {name: getattr(config, name) for name in names}
    values["options"] = {name: _plain(asdict(own)) for name, own in config.options.items()}
    return _plain(values)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _as_json(value) for name, value in values.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def buffers_of(state: RankState) -> Iterator[tuple[Placement, torch.Tensor]]:
    """Yield this rank's buffers that the seed does not determine: the unsharded biases that balance experts."""
    for stage in state.stages:
        for name, buffer in stage.named_buffers():
            yield Placement.whole(name, buffer.shape), buffer


def _original(placement: Placement) -> Placement:
    """Return the placement under which the tensor is stored; for a tied copy, its original's placement."""
    return placement if placement.tied_to is None else replace(placement, name=placement.tied_to)
