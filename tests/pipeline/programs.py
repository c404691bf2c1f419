"""What the executor's tests run on every rank, and the one process they compare it with."""

from __future__ import annotations

import torch

from minipar.model import IGNORE_INDEX, ModelConfig, Transformer
from minipar.pipeline import Pipeline, Schedule, partition


def make_batch(config: ModelConfig, batch_size: int, seed: int = 0):
    """Tokens and targets [batch_size, seq], some targets ignored, more in some samples than in others."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, config.max_seq_len)
    tokens, targets = (torch.randint(0, config.vocab_size, shape, generator=generator) for _ in range(2))
    targets[torch.rand(shape, generator=generator) < torch.rand(batch_size, 1, generator=generator) / 2] = (
        IGNORE_INDEX
    )
    return tokens, targets


def accumulate(model: Transformer, tokens, targets, m: int, step: int = 0):
    """One process: the loss of the whole batch, its gradients summed microbatch by microbatch."""
    count, total = (targets != IGNORE_INDEX).sum(), None
    ids = torch.arange(len(tokens))
    for x, t, i in zip(tokens.chunk(m), targets.chunk(m), ids.chunk(m)):
        loss = model.loss(x, t, sample_ids=i, step=step, count=count)
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


def own_stages(model: Transformer, schedule: Schedule, rank: int, costs=None):
    stages = partition(model, schedule.model_stages, costs)
    return [stages[schedule.part(s)] for s in schedule.stages_of(rank)]


def gradients(stages) -> dict[str, torch.Tensor]:
    """By canonical name; a tied copy under its own."""
    return {name: p.grad for stage in stages for name, p in stage.named_parameters()}


def train_step(world, config, dtype, schedule, batch, seed=0, steps=1, costs=None, **options):
    """Gradients after `steps` steps that accumulate, and the last loss; by all ranks of `world` that are needed."""
    torch.set_num_threads(1)
    comm = world.subgroup(range(schedule.num_ranks), "pp") if world.rank < schedule.num_ranks else None
    if comm is None:
        return None, {}
    model = Transformer(config, seed=seed, dtype=dtype, device=comm.device)
    stages = own_stages(model, schedule, comm.rank, costs)
    pipeline = Pipeline(stages, comm, schedule, **options)
    batch = [x.to(comm.device) for x in batch]
    for _ in range(steps):
        loss = pipeline.step(*batch, stage_kwargs={"step": 3})
    assert [a for a in pipeline.spans] == list(schedule.actions[comm.rank])
    grads = {name: grad.cpu() for name, grad in gradients(stages).items()}
    return None if loss is None else loss.cpu(), grads
