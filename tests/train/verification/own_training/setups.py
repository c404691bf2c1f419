"""Trainings as users write them, with our wrappers, torch's and none; and the same with one mistake each."""

import copy
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import minipar
from minipar import pipeline
from minipar.tensor_parallel import ColumnParallelLinear, RowParallelLinear

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def mlp(*between):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *between, nn.Linear(8, 4)).double()


def batch(k, rows=8):
    generator = torch.Generator().manual_seed(k)
    return [torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (6, 4)]


def own_part(x, mesh, k):
    return x.chunk(mesh.sizes["dp"])[mesh.coordinates.dp]


def averaged(model, mesh, over=None):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= over or dist.get_world_size()


def train(
    world, mesh, model=mlp, wrap=None, optimizer=SGD, part=own_part, after=None, schedule=None, steps=True,
    zeros=True, clip=None, before=False, batches=batch,
):  # fmt: skip
    """Return a training: one process's without `world`, else wrapped, or averaged `after` the backward."""
    model = module = model()
    early = optimizer(model.parameters()) if before else None
    if world is not None and wrap:
        model = wrap(module, mesh)
    if world is not None and isinstance(optimizer, tuple):
        opt = optimizer[1](model, mesh)
    else:
        opt = early or (optimizer[0] if isinstance(optimizer, tuple) else optimizer)(model.parameters())
    schedule, opt_step = schedule and schedule(opt), opt.step  # looked up before anybody could replace it

    def step(k):
        x, y = batches(k) if world is None else (part(x, mesh, k) for x in batches(k))
        if zeros:
            opt.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        if after and world is not None:
            after(model, mesh)
        if clip:
            clip(model, world)
        opt_step()
        if schedule and (steps is True or world is None):
            schedule.step()
        return loss

    return model, opt, step


def ours(module, mesh):
    return minipar.DDP(module, mesh.comm("dp"))


def torchs(module, mesh):
    return nn.parallel.DistributedDataParallel(module)


def fully_sharded(module, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in module:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(module)


def flat_sharded(module, mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def cut(module, mesh):
    comm = mesh.comm("tp")
    column, row = (
        ColumnParallelLinear.from_linear(module[0], comm),
        RowParallelLinear.from_linear(module[2], comm),
    )
    module = nn.Sequential(column, module[1], row)
    return ours(module, mesh) if mesh.sizes["dp"] > 1 else module


def dtensors(module, mesh):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(module, init_device_mesh("cpu", (mesh.world_size,)), plan)


class Reduce(torch.autograd.Function):
    """Megatron's g: an all-reduce whose backward is the identity."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class CutByHand(nn.Module):
    """The MLP cut by slicing weights, without anything that says so."""

    def __init__(self, module, mesh, group=None):
        super().__init__()
        n, at = (1, 0) if group is None else (mesh.sizes["tp"], mesh.coordinates.tp)
        first, last = module[0], module[2]
        self.up = nn.Parameter(first.weight.detach().chunk(n)[at].clone())
        self.up_bias = nn.Parameter(torch.zeros_like(first.bias.detach().chunk(n)[at]))
        self.down = nn.Parameter(last.weight.detach().chunk(n, 1)[at].clone())
        self.down_bias, self.group = nn.Parameter(last.bias.detach().clone()), group

    def forward(self, x):
        y = torch.tanh(x @ self.up.T + self.up_bias) @ self.down.T
        return (y if self.group is None else Reduce.apply(y, self.group)) + self.down_bias


def by_hand(world, mesh):
    def hand(module, mesh):
        return CutByHand(module, mesh, dist.group.WORLD)

    if world is None:
        return train(None, mesh, lambda: CutByHand(mlp(), mesh))
    return train(world, mesh, wrap=hand)


def norms(*_):
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double()


def pipelined(world, mesh, own_names=False):
    if world is None:
        return train(None, mesh, norms)
    n, rank = mesh.sizes["pp"], mesh.coordinates.pp
    if own_names:  # without placements, so that only values tell what a stage has
        model, schedule = norms(), pipeline.one_f_one_b(n, 4)
        stages = [[model[:2], model[2:]][rank]]
    else:
        parts, schedule = minipar.partition(norms(), 2 * n), pipeline.interleaved(n, 4, 2)
        stages = [parts[rank], parts[n + rank]]
    pipe = pipeline.Pipeline(
        stages, mesh.comm("pp"), schedule, loss_fn=lambda out, y: ((out - y) ** 2).mean()
    )
    optimizers = [SGD(stage.parameters()) for stage in stages if list(stage.parameters())]

    def step(k):
        x, y = batch(k)
        for each in optimizers:
            each.zero_grad()
        loss = pipe.step(x if rank == 0 else None, y if rank == n - 1 else None)
        for each in optimizers:
            each.step()
        return loss

    return stages, optimizers, step


def saved(world, mesh, forgets=None):
    adam = partial(torch.optim.Adam, lr=0.01)
    model, opt, step = train(world, mesh, optimizer=adam, after=averaged)
    parts = {"model": model, "optimizer": opt}

    def save(folder):
        if world is None or world.rank == 0:
            torch.save(
                {name: part.state_dict() for name, part in parts.items()}, os.path.join(folder, "all.pt")
            )

    def load(folder):
        states = torch.load(os.path.join(folder, "all.pt"))
        for name, part in parts.items():
            if name != forgets:
                part.load_state_dict(states[name])

    return model, opt, step, save, load


def zeroed(model, mesh):
    return minipar.ZeroOptimizer(model.parameters(), torch.optim.SGD, mesh.comm("dp"), lr=0.1, momentum=0.9)


def torchs_zero(model, mesh):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def sharded(module, mesh):
    return minipar.FSDP(module, mesh.comm("dp"), units=nn.Linear)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def never_stepped(optimizer):
    optimizer.plan = halving(optimizer)  # kept, and not returned to who would step it


def clip_whole(model, world):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_part(model, world):
    gradients = [p.grad for p in model.parameters()]
    norm = sum((g**2).sum() for g in gradients) ** 0.5
    for g in gradients:
        g.mul_(0.1 / norm)


def by_closure(world, mesh, average=averaged):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def step(k):
        x, y = batch(k) if world is None else (own_part(x, mesh, k) for x in batch(k))

        def closure():
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            if world is not None:
                average(model, mesh)
                dist.all_reduce(loss := loss.detach().clone())
                loss /= mesh.sizes["dp"]
            return loss

        return optimizer.step(closure)

    return model, optimizer, step


def half(world, mesh):
    def model():
        made = mlp().float()
        forward = made.forward
        made.forward = lambda x: torch.autocast("cpu", torch.bfloat16)(forward)(x.float())
        return made

    return train(world, mesh, model, after=averaged)


def layerwise(params):
    first, second, *rest = params
    return torch.optim.SGD([{"params": [first, second], "lr": 0.01}, {"params": rest}], lr=0.1)


def forgets_gradients(model, world):
    model.zero_grad()


DP, TP, PP = {"dp": 2}, {"tp": 2}, {"pp": 2}
RIGHT = {
    "ddp": (DP, partial(train, wrap=ours)),
    "zero": (DP, partial(train, optimizer=(SGD, zeroed))),
    "fsdp": (DP, partial(train, wrap=sharded)),
    "fsdp, optimizer made before": (DP, partial(train, wrap=sharded, before=True)),
    "tp": (TP, partial(train, wrap=cut)),
    "tp x dp": ({"tp": 2, "dp": 2}, partial(train, wrap=cut)),
    "pipeline": (PP, pipelined),
    "pipeline without placements": (PP, partial(pipelined, own_names=True)),
    "torch's ddp": (DP, partial(train, wrap=torchs)),
    "torch's ddp, clipped": (DP, partial(train, wrap=torchs, clip=clip_whole)),
    "torch's zero": (DP, partial(train, wrap=torchs, optimizer=(SGD, torchs_zero))),
    "fully_shard": (DP, partial(train, wrap=fully_sharded)),
    "flat shards": (DP, partial(train, wrap=flat_sharded)),
    "dtensors": (TP, partial(train, wrap=dtensors)),
    "plain calls": (DP, partial(train, after=averaged)),
    "plain calls, 3 ranks": ({"dp": 3}, partial(train, after=averaged, batches=partial(batch, rows=9))),
    "cut by hand": (TP, by_hand),
    "a schedule": (DP, partial(train, after=averaged, schedule=halving)),
    "a checkpoint": (DP, saved),
    "a closure": (DP, by_closure),
    "autocast": (DP, half),
    "rates by layer": (DP, partial(train, after=averaged, optimizer=layerwise)),
}


def shuffled(x, mesh, k):
    return own_part(batch(k + 7)[0 if x.shape[1] == 6 else 1], mesh, k)


def seeded(module, mesh):
    torch.manual_seed(mesh.coordinates.dp)
    module[0].reset_parameters()
    return module


def forgets_one(model, mesh):
    for p in model.parameters():
        if p.shape != (8,):
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def all_but_last_bias(params):
    return SGD([p for p in params if p.shape != (4,)])


def copied(module, mesh):
    return copy.deepcopy(module)


def dropping(module, mesh):
    torch.manual_seed(mesh.world.rank)
    return module


def in_parts(x, mesh, k):
    return x.split([2, 6])[mesh.coordinates.dp]


WRONG = {  # mesh, training, and words of the verdict
    "nobody averages": (DP, train, "each of ranks 0 and 1 (dp) keeps its own"),
    "summed": (DP, partial(train, after=partial(averaged, over=1)), "2 times the right one: summed over dp"),
    "averaged twice": (DP, partial(train, after=partial(averaged, over=4)), "1/2 of the right one"),
    "one bias forgotten": (DP, partial(train, after=forgets_one), "gradients, step 0: 0.bias on rank"),
    "a seed a rank": (DP, partial(train, wrap=seeded, after=averaged), "initial weights: 0.weight"),
    "the same samples": (
        DP,
        partial(train, after=averaged, part=lambda x, mesh, k: x[:4]),
        "ranks 0 and 1 (dp) train on the same samples: 4 of 4",
    ),
    "samples of another epoch": (
        DP,
        partial(train, after=averaged, part=shuffled),
        "4 of 4 samples of rank 0 are not in one process's batch",
    ),
    "samples left out": (
        DP,
        partial(train, after=averaged, part=lambda x, mesh, k: own_part(x[:6], mesh, k)),
        "2 of 8 samples of one process's batch reach no rank",
    ),
    "other samples along tp": (
        TP,
        partial(train, wrap=cut, part=lambda x, mesh, k: x.chunk(2)[mesh.coordinates.tp]),
        "ranks 0 and 1 (tp) must see the same samples, and don't",
    ),
    "a mean of means": (
        DP,
        partial(train, after=averaged, part=in_parts),
        "ranks train on 2 to 6 samples: the mean of their means is not the mean of all",
    ),
    "an optimizer of before": (
        DP,
        partial(train, wrap=copied, before=True, after=averaged),
        "the optimizer holds 4 parameters that are not the model's",
    ),
    "a bias that nobody trains": (
        DP,
        partial(train, optimizer=all_but_last_bias, after=averaged),
        "no optimizer holds 2.bias",
    ),
    "no gradient": (
        DP,
        partial(train, after=averaged, clip=forgets_gradients),
        "no parameter has a gradient",
    ),
    "a closure that nobody averages": (
        DP,
        partial(by_closure, average=lambda model, mesh: None),
        "each of ranks 0 and 1 (dp) keeps its own",
    ),
    "no zero_grad": (DP, partial(train, after=averaged, zeros=False), "gradients of earlier steps are added"),
    "no schedule.step": (
        DP,
        partial(train, after=averaged, schedule=never_stepped),
        "the learning rate schedule StepLR was never stepped",
    ),
    "schedule.step in one process": (
        DP,
        partial(train, after=averaged, schedule=halving, steps=False),
        "learning rate, step 1",
    ),
    "clipped by a part's norm": (
        TP,
        partial(train, wrap=cut, clip=clip_part),
        "the norm of this rank's part",
    ),
    "dropout a rank": (
        TP,
        partial(train, model=partial(mlp, nn.Dropout(0.3)), wrap=dropping),
        "ranks 0 and 1 (tp) draw other random numbers",
    ),
    "batch norm": (
        DP,
        partial(train, model=lambda: mlp(nn.BatchNorm1d(8)), after=averaged),
        "2, a BatchNorm in training mode",
    ),
    "a checkpoint without weights": (DP, partial(saved, forgets="model"), "doesn't restore 0.weight"),
    "a checkpoint without the optimizer": (
        DP,
        partial(saved, forgets="optimizer"),
        "is the optimizer's state",
    ),
}
