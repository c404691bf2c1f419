"""A training step against nanoGPT's, in one process: a Llama and a GPT of as many parameters, with AdamW, in float32

Not the same: nanoGPT's GPT has learned positions, LayerNorm and GELU, and its head is its embedding; our Llama has rotary
positions, RMSNorm and SwiGLU. Both have no biases, read the same tokens, and clip the norm of the gradients to 1.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Row, Times, race, row
from benchmarks.peers.picotron import LR, MODEL, SAMPLES
from minipar import run
from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh
from minipar.train.data.text import Text, batch_of, load_data
from minipar.train.optim import BETAS
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step


def rows(path: Path, quick: bool = False) -> Iterator[Row]:
    """Race a step in one process. Raises ValueError if `path` is no checkout of nanoGPT."""
    if not (path / "model.py").exists():
        raise ValueError(f"nanogpt={path} is no checkout of nanoGPT: it has no model.py")
    config = TrainConfig(
        model=MODEL, batch_size=SAMPLES, seq_len=MODEL.max_seq_len, dtype="float32", steps=1000, warmup=0,
        lr=LR, grad_clip=1.0,
    )  # fmt: skip
    ((times, losses),) = run(_race, config, path.resolve(), 2 if quick else 7, world_size=1)
    made = row("one process", [times], bar=1.0)
    tokens = config.batch_size * config.seq_len
    speeds = f"{tokens / made.ours_s:,.0f} and {tokens / made.theirs_s:,.0f} tokens/s"
    told = "losses " + " and ".join(f"{found[0]:.4f} to {found[-1]:.4f}" for found in losses)
    yield made._replace(note=f"{made.note}  {speeds}; {told}")


def _race(world: Comm, config: TrainConfig, path: Path, rounds: int) -> tuple[Times, tuple[list[float], ...]]:
    text = load_data(config)[0]
    state = parallelize(config, Mesh(world), world.device)
    model, optimizer = _gpt(path, config)
    ours: list[float] = []
    theirs: list[float] = []

    def our_step() -> None:
        ours.append(train_step(world, state, config, text, len(ours))["loss"])

    def their_step() -> None:
        theirs.append(_step(model, optimizer, config, text, len(theirs)))

    return race(world, our_step, their_step, rounds), (ours, theirs)


def _gpt(path: Path, config: TrainConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return nanoGPT's model with dimensions that give a block as many parameters as ours, and its optimizer."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = config.model
    torch.manual_seed(config.seed)
    model = module.GPT(
        module.GPTConfig(own.max_seq_len, own.vocab_size, own.num_layers, own.num_heads, own.dim, 0.0, False)
    )
    return model, model.configure_optimizers(config.weight_decay, LR, BETAS, "cpu")


def _step(model: Any, optimizer: torch.optim.Optimizer, config: TrainConfig, text: Text, step: int) -> float:
    batch = batch_of(config, text, step)
    loss = model(batch.tokens, batch.targets)[1]
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())
