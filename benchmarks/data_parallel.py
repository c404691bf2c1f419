"""A DDP training step against torch's DDP: the same model, batch and optimizer, in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Row, Step, Times, race, row, run, worlds
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.data_parallel import DDP
from minipar.model import Transformer

MODELS = {
    "2 M": ModelConfig(dim=192, num_layers=4, num_heads=4),
    "20 M": ModelConfig(dim=512, num_layers=6, num_heads=8),
}


def rows(quick: bool = False) -> list[Row]:
    """Race steps of ~2 M and ~20 M parameters on 2 and 4 ranks; 2 samples of 64 tokens each, so communication matters."""
    rounds = 5 if quick else 15
    return [
        row(
            f"DDP step, {name} parameters, {p} ranks",
            run(_race_step, config, rounds, world_size=p),
            bar=1.0,
        )
        for name, config in MODELS.items()
        for p in worlds()
    ]


def _race_step(world: Comm, config: ModelConfig, rounds: int) -> Times:
    torch_ddp = partial(
        DistributedDataParallel, process_group=world.process_group(), gradient_as_bucket_view=True
    )
    ours, theirs = (_trainer(wrap, world, config) for wrap in (partial(DDP, comm=world), torch_ddp))
    return race(world, ours, theirs, rounds)


def _trainer(wrap: Callable[[Transformer], nn.Module], world: Comm, config: ModelConfig) -> Step:
    model = wrap(Transformer(config, device=world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(world.rank)
    tokens = torch.randint(0, config.vocab_size, (2, 64), generator=generator).to(world.device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step
