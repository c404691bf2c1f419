"""What the executor's tests run on every rank, and the one process they compare it with."""

from __future__ import annotations

from collections import defaultdict

import torch

import minipar
from minipar.config.model_config import ModelConfig
from minipar.mesh import gather
from minipar.model import IGNORE_INDEX, Transformer
from minipar.pipeline import Pipeline, measured, partition
from minipar.pipeline.emulate import emulate
from minipar.schedules.costs import Costs
from minipar.schedules.registry import SCHEDULES
from minipar.schedules.schedule import Schedule
from minipar.schedules.simulate import simulate
from tests.strategies import assert_equal_to


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
    stages = partition(model, schedule.num_stages, costs)
    return [stages[s] for s in schedule.stages_of(rank)]


def pipeline_for(schedule: Schedule) -> type[Pipeline]:
    """The class that runs schedules of this kind: the core's, or the one that comes with an extra."""
    classes = [choice.load() for choice in SCHEDULES.usable().values()]
    return next(c for c in classes if c.runs is type(schedule))


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
    pipeline = pipeline_for(schedule)(stages, comm, schedule, **options)
    batch = [x.to(comm.device) for x in batch]
    for _ in range(steps):
        loss = pipeline.step(*batch, stage_kwargs={"step": 3})
    assert [a for a in pipeline.spans] == list(schedule.actions[comm.rank])
    grads = {name: grad.cpu() for name, grad in gradients(stages).items()}
    return None if loss is None else loss.cpu(), grads


def small_config(num_layers: int, **options) -> ModelConfig:
    sizes = dict(vocab_size=24, dim=8, num_heads=2, hidden_dim=16, max_seq_len=4)
    return ModelConfig(num_layers=num_layers, **{**sizes, **options})


def together(parts) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and all gradients, from what each rank returned."""
    (loss,) = (loss for loss, _ in parts if loss is not None)
    return loss, {name: grad for _, grads in parts for name, grad in grads.items()}


def one_process(config, dtype, batch, m, seed=0, steps=1, device="cpu"):
    model = Transformer(config, seed=seed, dtype=dtype, device=device)
    for _ in range(steps):
        loss = accumulate(model, *(x.to(device) for x in batch), m, step=3)
    return loss.cpu(), {name: p.grad.cpu() for name, p in model.named_parameters()}


def assert_same(got: dict, want: dict, rtol: float = 1e-10) -> None:
    assert got.keys() >= want.keys()
    for name in want:
        assert_equal_to(got[name], want[name], rtol, what=name)


def assert_gathered(by_rank, want: dict) -> None:
    """Require the (placement, gradient) pairs of all ranks to be, put together, the gradients of one process."""
    by_name = defaultdict(list)
    for grads in by_rank:
        for placement, grad in grads:
            by_name[placement.name].append((placement, grad))
    assert by_name.keys() - {"head.weight"} == want.keys() - {"head.weight"}
    for name, held in by_name.items():
        assert_equal_to(gather(held), want[name if name in want else "embedding.weight"], what=name)


def mean_square(output, target):
    return (output - target).square().mean()


def refusal(fn, world_size=1, expected=ValueError):
    """The message of what `fn(world)` raises on a rank, or None."""

    def catch(world):
        try:
            fn(world)
        except expected as error:
            return str(error)

    return minipar.run(catch, world_size=world_size, timeout_s=60)


def check_emulated(schedule: Schedule) -> None:
    """Require an emulated run to take at least what its actions cost, and begin at time 0."""
    asked = Costs(F=0.002, I=0.004, W=0.003)
    spans = minipar.run(emulate, schedule, asked, world_size=schedule.num_ranks)
    timeline = measured(schedule, spans)
    table = asked.table(schedule.num_stages)
    for (op, stage, _), (start, end) in timeline.spans.items():
        assert end - start >= table[op][stage] - 1e-9
    assert min(start for start, _ in timeline.spans.values()) == 0
    assert timeline.makespan >= simulate(schedule, asked).makespan
