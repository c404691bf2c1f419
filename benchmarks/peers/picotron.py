"""A training step against picotron's: the same Llama, weights and batch on the same mesh, with AdamW, in float32

Not the same: our step also makes its part of the batch and computes the gradients' norm; picotron gathers the logits of all
tp ranks, and sums gradients that it then divides. Our ring has zigzag positions; picotron's has positions in order.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Row, Times, race, row
from minipar import run
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh
from minipar.model import Transformer
from minipar.model.huggingface import huggingface_name
from minipar.train.checkpoint.export import llama_config
from minipar.train.data.text import Text, batch_of, load_data
from minipar.train.optim import BETAS
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step

MODEL = ModelConfig(dim=384, num_layers=8, num_heads=8, max_seq_len=256)  # 14 M parameters
SAMPLES, LR, MICROBATCHES = 8, 3e-4, 4
BUCKET_MB = 25.0  # as in picotron's DataParallelBucket
MESHES: tuple[dict[str, int], ...] = (
    {"dp": 4},
    {"tp": 4},
    {"pp": 4},
    {"cp": 4},
    {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "pp": 2},
)
# Imported by picotron, and not needed on a CPU with weights and tokens of our own.
NOT_NEEDED = (
    "datasets",
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn.layers",
    "flash_attn.layers.rotary",
    "flash_attn.ops",
    "flash_attn.ops.triton",
    "flash_attn.ops.triton.layer_norm",
    "huggingface_hub",
    "transformers",
    "wandb",
)


def rows(path: Path, quick: bool = False) -> Iterator[Row]:
    """Race a step on each mesh. Raises ValueError if `path` is no checkout of picotron."""
    if not (path / "picotron" / "process_group_manager.py").exists():
        raise ValueError(
            f"picotron={path} is no checkout of picotron: it has no picotron/process_group_manager.py"
        )
    for mesh in MESHES[:2] if quick else MESHES:
        config = config_of(mesh)
        results = run(_race, config, str(path.resolve()), 2 if quick else 7, world_size=config.world_size)
        ours, theirs = (max(losses, key=lambda loss: loss[-1]) for losses in zip(*(r[1] for r in results)))
        if abs(ours[0] - theirs[0]) > 1e-4:
            raise ValueError(
                f"before any step, our loss is {ours[0]} and picotron's {theirs[0]}: two models are compared"
            )
        name = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
        tokens = SAMPLES * config.seq_len
        made = row(name, [times for times, _ in results], bar=1.0)
        speeds = f"{tokens / made.ours_s:,.0f} and {tokens / made.theirs_s:,.0f} tokens/s"
        told = f"losses {ours[0]:.4f} to {ours[-1]:.4f} and {theirs[0]:.4f} to {theirs[-1]:.4f}"
        yield made._replace(note=f"{made.note}  {speeds}; {told}")


def config_of(mesh: dict[str, Any], model: ModelConfig = MODEL) -> TrainConfig:
    return TrainConfig(
        model=model, batch_size=SAMPLES, seq_len=model.max_seq_len, dtype="float32", steps=1000, warmup=0, lr=LR,
        grad_clip=0.0, weight_decay=0.0, bucket_mb=BUCKET_MB, schedule="1f1b" if "pp" in mesh else "gpipe",
        microbatches=MICROBATCHES if "pp" in mesh else 1, **mesh,
    )  # fmt: skip


def _race(
    world: Comm, config: TrainConfig, path: str, rounds: int
) -> tuple[Times, tuple[list[float], list[float]]]:
    """Return the times of the steps on this rank, and the losses of our steps and of theirs."""
    text = load_data(config)[0]
    mesh = Mesh(world, **config.mesh_sizes)
    state = parallelize(config, mesh, world.device)
    ours: list[float] = []
    theirs: list[float] = []

    def our_step() -> None:
        ours.append(train_step(world, state, config, text, len(ours))["loss"])

    their_step = picotron_step(world, config, text, path)
    times = race(world, our_step, lambda: theirs.append(their_step()), rounds)
    return times, (ours, theirs)


def picotron_step(world: Comm, config: TrainConfig, text: Text, path: str) -> Callable[[], float]:
    """Return a function that trains picotron's model for one step, and returns the loss of the whole batch."""
    modules = _imported(path, config, world)
    manager = modules.manager.process_group_manager
    whole = modules.model.Llama(_llama(config.model))
    model = modules.tensor.apply_tensor_parallel(whole) if config.tp > 1 else whole
    if config.pp > 1:
        model = modules.pipeline.PipelineParallel(model, _llama(config.model))
    _load(model, config, manager, modules.checkpoint.InitializationManager(model, _llama(config.model)))
    if config.cp > 1:
        model = modules.context.apply_context_parallel(model)
    if config.dp * config.cp > 1:
        model = modules.data.DataParallelBucket(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    loader = Microbatches(config, text, manager)
    samples = SAMPLES // config.dp // loader.grad_acc_steps
    shape = (samples, config.seq_len // config.cp, config.model.dim)

    def step() -> float:
        optimizer.zero_grad()
        if config.pp > 1:
            loss = modules.pipeline.train_step_pipeline_1f1b(
                model, loader, shape, world.device, torch.float32
            )
        else:
            loss = modules.train.train_step(model, loader, world.device)
        loss = modules.utils.average_loss_across_dp_cp_ranks(loss, world.device)
        optimizer.step()
        if hasattr(model, "reset"):
            model.reset()
        return float(loss)

    return step


class Microbatches:
    """Tokens as picotron's loader gives them: this rank's samples and positions, a microbatch at a time, without end."""

    def __init__(self, config: TrainConfig, text: Text, manager: Any) -> None:
        self.grad_acc_steps = config.microbatches
        self._found = _microbatches(config, text, manager.dp_rank, manager.cp_rank)

    def __next__(self) -> dict[str, Tensor | None]:
        return next(self._found)


def _microbatches(
    config: TrainConfig, text: Text, dp_rank: int, cp_rank: int
) -> Iterator[dict[str, Tensor | None]]:
    samples = torch.arange(SAMPLES).chunk(config.dp)[dp_rank]
    positions = torch.arange(config.seq_len).chunk(config.cp)[cp_rank]
    for step in count():
        batch = batch_of(config, text, step)
        tokens, targets = (x[samples][:, positions].contiguous() for x in (batch.tokens, batch.targets))
        for i, t in zip(tokens.chunk(config.microbatches), targets.chunk(config.microbatches)):
            yield {
                "input_ids": i, "target_ids": t, "position_ids": positions.expand_as(i), "hidden_states": None
            }  # fmt: skip


def _imported(path: str, config: TrainConfig, world: Comm) -> SimpleNamespace:
    """Import picotron for this mesh, over a process group of this rank's world."""
    os.environ |= {"DEVICE": "cpu", "FLASH_ATTEN": "0", "DTYPE": "float32", "LOCAL_RANK": str(world.rank)}
    os.environ["CONTEXT_PARALLEL"] = str(int(config.cp > 1))
    for name in NOT_NEEDED:
        sys.modules[name] = MagicMock()
    torch.cuda.synchronize = lambda device=None: None  # its pipeline synchronises a GPU, on a CPU too
    if path not in sys.path:
        sys.path.insert(0, path)
    if not dist.is_initialized():
        world.process_group()
    names = dict(
        manager="picotron.process_group_manager",
        model="picotron.model",
        tensor="picotron.tensor_parallel.tensor_parallel",
        pipeline="picotron.pipeline_parallel.pipeline_parallel",
        context="picotron.context_parallel.context_parallel",
        data="picotron.data_parallel.data_parallel",
        checkpoint="picotron.checkpoint",
        utils="picotron.utils",
        train="train",
    )
    modules = SimpleNamespace(**{short: importlib.import_module(name) for short, name in names.items()})
    modules.manager.setup_process_group_manager(config.tp, config.cp, config.pp, config.dp)
    return modules


def _llama(model: ModelConfig) -> SimpleNamespace:
    return SimpleNamespace(**llama_config(model))


def _load(model: nn.Module, config: TrainConfig, manager: Any, names: Any) -> None:
    """Give picotron's model this rank's part of our initial weights."""
    ours = Transformer(config.model, seed=config.seed).state_dict()
    theirs = {names.convert_safetensors_to_hf_name(huggingface_name(name)): x for name, x in ours.items()}
    theirs["final_proj.weight"] = ours["head.weight"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = theirs[name]
            for dim in range(part.dim()):
                if part.shape[dim] != parameter.shape[dim]:
                    part = part.chunk(manager.tp_world_size, dim)[manager.tp_rank]
            parameter.copy_(part)
