"""A DDP step with cheap messages against torch's own communication hooks: PowerSGD, and 16-bit gradients beside int8."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Row, Step, Times, race, row, run, worlds
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.data_parallel import DDP
from minipar.extras.compress import CompressedBuckets, CompressedMean, Int8, PowerSGD
from minipar.model import Transformer

CONFIG = ModelConfig(dim=192, num_layers=4, num_heads=4)


def rows(quick: bool = False) -> list[Row]:
    """Race steps of ~2 M parameters on 2 and 4 ranks; the note has the bytes that each of our ranks sends per step."""
    rounds = 5 if quick else 15
    found = []
    for name in ("PowerSGD, rank 2", "int8 vs fp16"):
        for p in worlds():
            times = run(_race_hooks, name, rounds, world_size=p)
            note = f"{times[0][1]:,} bytes, plain {times[0][2]:,}"
            found.append(row(f"{name}, {p} ranks", [rank[0] for rank in times], note=note))
    return found


def _race_hooks(world: Comm, name: str, rounds: int) -> tuple[Times, int, int]:
    group = world.process_group()
    # One bucket: with several and gloo, torch's PowerSGD hook runs its callbacks' collectives in different orders on ranks.
    theirs = DistributedDataParallel(
        Transformer(CONFIG, device=world.device),
        process_group=group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=100,
    )
    if name.startswith("PowerSGD"):
        state = PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        theirs.register_comm_hook(state, powerSGD_hook)
        compressed = CompressedBuckets(partial(PowerSGD, rank=2))
    else:
        theirs.register_comm_hook(group, default_hooks.fp16_compress_hook)
        compressed = CompressedBuckets(partial(CompressedMean, codec=Int8()))
    ours = DDP(Transformer(CONFIG, device=world.device), world, reduce_bucket=compressed)
    steps = [_trainer(model, world) for model in (ours, theirs)]
    sent = _sent_by(world, steps[0])
    plain = _sent_by(world, _trainer(DDP(Transformer(CONFIG, device=world.device), world), world))
    for step in steps * 3:  # go past the first steps, in which torch's hook does not compress
        step()
    return race(world, steps[0], steps[1], rounds), sent, plain


def _sent_by(world: Comm, step: Step) -> int:
    before = world.traffic.sent_bytes
    step()
    return world.traffic.sent_bytes - before


def _trainer(model: nn.Module, world: Comm) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(world.rank)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 64), generator=generator).to(world.device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step
