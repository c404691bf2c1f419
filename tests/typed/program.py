"""A program as a user with a type checker writes it: every public name, strictly typed. Run, and read by mypy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import minipar
from minipar import pipeline
from minipar.comm import Comm
from minipar.comm.transport.traffic import Traffic
from minipar.data_parallel import DynamicLossScaler
from minipar.mesh import Placement, placement_of
from minipar.schedules import Action, Costs, Schedule, Timeline
from minipar.spec import SPECIFICATIONS, Report


def collectives(world: Comm) -> float:
    x: Tensor = torch.ones(2 * world.size)
    total: Tensor = world.all_reduce(x, "mean", algorithm="ring")
    part: Tensor = world.reduce_scatter(x)
    whole: Tensor = world.all_gather(part)
    told: Tensor = world.broadcast(whole, root=0)
    turned: Tensor = world.all_to_all(told)
    to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    got: Tensor | None = world.exchange(turned, to, turned.shape, turned.dtype, source)
    assert got is not None
    ledger: Traffic = world.traffic
    world.subgroup([world.rank], "alone").barrier()
    return float(total.sum() + got.sum()) + ledger.sent_bytes + ledger.messages


def mesh(world: Comm) -> tuple[int, int]:
    grid = minipar.Mesh(world, dp=world.size)
    dp: Comm = grid.comm("dp")
    return dp.size, grid.coordinates.dp


def strategies(world: Comm) -> float:
    config = minipar.ModelConfig(vocab_size=16, dim=8, num_layers=2, num_heads=2, max_seq_len=8)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model = minipar.Transformer(config, seed=0)
    ddp: minipar.DDP = minipar.DDP(model, world, bucket_mb=1.0)
    logits: Tensor = ddp(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    with ddp.no_sync():
        torch.autograd.backward(loss)
    ddp.synchronize()
    norm: Tensor = minipar.clip_grad_norm_(ddp.parameters(), 1.0)
    zero = minipar.ZeroOptimizer(
        minipar.Transformer(config).parameters(), torch.optim.SGD, world, stage=1, lr=0.1
    )
    zero.step()
    fsdp: minipar.FSDP = minipar.FSDP(nn.Linear(4, 4), world, units=nn.Linear, reshard_after_forward=True)
    state: dict[str, Tensor] = fsdp.full_state_dict()
    placement: Placement = placement_of(next(ddp.module.parameters()))
    scaler = DynamicLossScaler(world, initial=2.0**4)
    return float(norm) + len(state) + placement.numel + float(scaler.scale(logits.detach().sum()))


def layers(world: Comm) -> float:
    x = torch.ones(1, 4, 4)
    column = minipar.ColumnParallelLinear.from_linear(nn.Linear(4, 4), world)
    row = minipar.RowParallelLinear.from_linear(nn.Linear(4, 4), world)
    y: Tensor = row(column(x))
    embedding = minipar.VocabParallelEmbedding.from_embedding(nn.Embedding(4, 4), world)
    rows: Tensor = embedding(torch.zeros(1, 2, dtype=torch.int64))
    loss: Tensor = minipar.vocab_parallel_cross_entropy(world, y[0], torch.zeros(4, dtype=torch.int64))
    q = torch.ones(1, 2, 4, 4)
    around: Tensor = minipar.ring_attention(world, q, q, q, causal=True)
    across: Tensor = minipar.ulysses_attention(world, q, q, q)
    alone = minipar.flash_attention(q, q, q)
    assert isinstance(alone, Tensor)
    moe = minipar.SwitchMoE(4, 4, 2, top_k=1, capacity_factor=1.25, comm=world)
    answer, metrics = moe(x)
    dropped: int = int(metrics.dropped)
    return float(sum(t.detach().sum() for t in (y, rows, loss, around, across, alone, answer))) + dropped


def pipelines(world: Comm) -> float | None:
    schedule: Schedule = pipeline.one_f_one_b(world.size, 2)
    first: Action = schedule.actions[0][0]
    timeline: Timeline = pipeline.simulate(schedule, Costs(F=1, I=1, W=1, comm=0.1))
    assert timeline.makespan > 0
    assert first.op == "F"
    stages: Sequence[nn.Module] = [nn.Linear(4, 4)]
    runner = minipar.Pipeline(stages, world, schedule, nn.functional.mse_loss)
    x = torch.ones(4, 4)
    loss: Tensor | None = runner.step(
        x if world.rank == 0 else None, x if world.rank == world.size - 1 else None
    )
    return None if loss is None else float(loss)


def main() -> None:
    sums: list[float] = minipar.run(collectives, world_size=2)
    sizes: list[tuple[int, int]] = minipar.run(mesh, world_size=2)
    assert sizes == [(2, 0), (2, 1)]
    assert len(sums) == 2
    minipar.run(strategies, world_size=2)
    minipar.run(layers, world_size=2)
    losses: list[float | None] = minipar.run(pipelines, world_size=2)
    assert losses[0] is None
    assert losses[1] is not None
    config: minipar.TrainConfig = minipar.TrainConfig(dp=1, steps=1)
    report: Report = SPECIFICATIONS["mesh"].check(lambda *axes, **sizes: [])
    try:
        minipar.run(pipelines, world_size=2, backend="gloo").clear()
    except minipar.RankError as error:
        failed: int = error.rank
        print(failed, error.remote_traceback)
    print(config.steps, report.ok)
    minipar.shutdown()


if __name__ == "__main__":
    main()
