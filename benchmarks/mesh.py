"""Two mesh axes at once against the same composed of torch's own, and the cost of an asynchronous checkpoint."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed.pipelining as theirs
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

import minipar
from benchmarks.harness import Row, Times, race, row, run, worlds
from benchmarks.tensor_parallel import dtensor
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh
from minipar.model import Block, Transformer
from minipar.pipeline import partition
from minipar.train.checkpoint.saver import Saver
from minipar.train.optim import BETAS
from minipar.train.parallelize import parallelize
from minipar.train.state import described, parts_of

CONFIG = ModelConfig(dim=256, num_layers=4, num_heads=8, max_seq_len=128)  # 3.4 million parameters
Pair = tuple[Tensor, Tensor]  # inputs and targets of a rank
LossStep = Callable[[], Tensor | float]  # returns the rank's part of the loss
MICROBATCHES, EVERY = 4, 10  # microbatches of the pipeline; steps between checkpoints


def rows(quick: bool = False) -> list[Row]:
    """Race whole training steps, AdamW included, on four ranks; then ten steps with and without a checkpoint."""
    if 4 not in worlds():
        return []
    rounds = 3 if quick else 11
    minipar.shutdown()  # a device mesh needs a world of exactly four processes
    found = [
        row("dp 2 x tp 2 step", run(_race_dp_tp, rounds, world_size=4), 1.0, "fully_shard + DTensor"),
        row("dp 2 x pp 2 step", run(_race_dp_pp, rounds, world_size=4), 1.0, "DDP + pipelining"),
    ]
    minipar.shutdown()
    with tempfile.TemporaryDirectory(prefix="minipar-") as folder:
        times = run(_race_checkpoint, Path(folder), 3 if quick else 7, world_size=2)
    return [*found, row("checkpoint every 10 steps vs none", times, 1.05, "asynchronous, dp 2 with ZeRO-1")]


def _race_dp_tp(world: Comm, rounds: int) -> Times:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch.distributed")
    ours, batch = _ours(world, dp=2, tp=2, zero=3)
    return _race_alike(world, ours, _fully_shard_and_dtensor(batch), rounds)


def _race_dp_pp(world: Comm, rounds: int) -> Times:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch.distributed")
    ours, batch = _ours(world, dp=2, pp=2, microbatches=MICROBATCHES)
    return _race_alike(world, ours, _ddp_and_pipelining(batch), rounds)


def _race_alike(world: Comm, ours: LossStep, others: LossStep, rounds: int) -> Times:
    losses = [world.all_reduce(torch.as_tensor(step())) for step in (ours, others)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)  # the same work, or the ratio means nothing
    return race(world, ours, others, rounds)


def _ours(world: Comm, **changes: Any) -> tuple[LossStep, Pair]:
    """Return a training step and this rank's batch."""
    config = TrainConfig(model=CONFIG, batch_size=16, seq_len=128, **changes)
    mesh = Mesh(world, **config.mesh_sizes)
    state = parallelize(config, mesh, world.device)
    for group in state.optimizer.param_groups:
        group["lr"] = 1e-3
    batch = torch.randint(256, (2, 16, 128), generator=torch.Generator().manual_seed(0)).to(world.device)
    inputs, targets = batch.chunk(config.dp, dim=1)[mesh.coordinates.dp]

    def step() -> Tensor | float:
        state.optimizer.zero_grad()
        loss = state.pipeline.step(inputs, targets, count=batch[1].numel())
        state.optimizer.step()
        return 0.0 if loss is None else loss.detach() / config.tp  # all tp ranks have the same loss

    return step, (inputs, targets)


def _fully_shard_and_dtensor(batch: Pair) -> LossStep:
    mesh = init_device_mesh(batch[0].device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = dtensor(Transformer(CONFIG, device=batch[0].device), mesh["tp"], False)
    for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.1)

    def step() -> Tensor | float:
        optimizer.zero_grad()
        with loss_parallel():
            loss = model.loss(*batch)
            loss.backward()
        optimizer.step()
        return (loss.full_tensor() if hasattr(loss, "full_tensor") else loss.detach()) / 4

    return step


def _ddp_and_pipelining(batch: Pair) -> LossStep:
    mesh = init_device_mesh(batch[0].device.type, (2, 2), mesh_dim_names=("pp", "dp"))
    stage, last = mesh["pp"].get_local_rank(), mesh["pp"].get_local_rank() == 1
    part = partition(Transformer(CONFIG, device=batch[0].device), 2)[stage]
    module = DistributedDataParallel(part, process_group=mesh["dp"].get_group())
    wrapped = theirs.PipelineStage(module, stage, 2, batch[0].device, group=mesh["pp"].get_group())
    runner = theirs.Schedule1F1B(wrapped, MICROBATCHES, loss_fn=_cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.1)

    def step() -> Tensor | float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if last:
            runner.step(target=batch[1], losses=losses)
        else:
            runner.step(batch[0])
        optimizer.step()
        return torch.stack(losses).mean().detach() / 2 if losses else 0.0

    return step


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _race_checkpoint(world: Comm, folder: Path, rounds: int) -> Times:
    """Race ten steps with a background save, until the save is finished, against ten steps alone."""
    torch.set_num_threads(1)
    config = TrainConfig(model=CONFIG, batch_size=16, seq_len=128, dp=world.size, zero=1)
    state = parallelize(config, Mesh(world, dp=world.size), world.device)
    batch = torch.randint(256, (2, 8, 128), generator=torch.Generator().manual_seed(world.rank)).to(
        world.device
    )
    saver, numbers_of_saves = Saver(world, folder, keep=1), count(1)

    def steps() -> None:
        for _ in range(EVERY):
            state.optimizer.zero_grad()
            state.pipeline.step(*batch, count=2 * batch[1].numel())
            state.optimizer.step()
            saver.poll()

    def save_and_steps() -> None:
        parts, numbers = parts_of(state)
        saver.save(next(numbers_of_saves), parts, described(config), numbers)
        steps()
        saver.finish()

    return race(world, save_and_steps, steps, rounds)
