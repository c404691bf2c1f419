"""Trainings beside the blind scripts: other wrappers and none, pipelines, checkpoints, closures; and mistakes."""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer

import minipar
from minipar import pipeline
from minipar.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.train.verification.scripts.lora import SumOverRanks

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def mlp(*between):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *between, nn.Linear(8, 4)).double()


def batch(k):
    generator = torch.Generator().manual_seed(k)
    return [torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (6, 4)]


def own_part(x, mesh):
    return x.chunk(mesh.sizes["dp"])[mesh.coordinates.dp]


def averaged(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def train(
    world, mesh, model=mlp, wrap=None, optimizer=SGD, part=own_part, after=lambda model: None, before=False
):
    """Return a training, on ranks wrapped; `after` the backward its gradients are averaged, if nothing else does it."""
    model = module = model()
    early = optimizer(model.parameters())
    if world is not None and wrap:
        model = wrap(module, mesh)
    opt = early if before else optimizer(model.parameters())
    opt_step = (
        opt.step if isinstance(opt, torch.optim.Optimizer) else lambda: opt.step()
    )  # looked up before it is watched

    def step(k):
        x, y = (x if world is None else part(x, mesh) for x in batch(k))
        opt.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        after(model)
        opt_step()
        return loss

    return model, opt, step


def flat_sharded(module, mesh):
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def cut(module, mesh):
    cuts = ColumnParallelLinear.from_linear, RowParallelLinear.from_linear
    return nn.Sequential(cuts[0](module[0], mesh.comm("tp")), module[1], cuts[1](module[2], mesh.comm("tp")))


def dtensors(module, mesh):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(module, init_device_mesh("cpu", (mesh.world_size,)), plan)


class CutByHand(nn.Module):
    """The MLP cut by slicing weights, without anything that says so. One bias is of zeros, whose parts are all alike."""

    def __init__(self, mesh):
        super().__init__()
        n, at, (first, _, last) = mesh.sizes["tp"], mesh.coordinates.tp, mlp()
        self.up = nn.Parameter(first.weight.detach().chunk(n)[at].clone())
        self.up_bias = nn.Parameter(torch.zeros_like(first.bias.detach().chunk(n)[at]))
        self.down = nn.Parameter(last.weight.detach().chunk(n, 1)[at].clone())
        self.down_bias = nn.Parameter(last.bias.detach().clone())

    def forward(self, x):
        return SumOverRanks.apply(torch.tanh(x @ self.up.T + self.up_bias) @ self.down.T) + self.down_bias


def by_hand(world, mesh):
    return train(world, mesh, partial(CutByHand, mesh))


def norms():
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


def torchs_zero(params):
    if dist.get_world_size() == 1:
        return SGD(params)
    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9)


def sharded(module, mesh):
    return minipar.FSDP(module, mesh.comm("dp"), units=nn.Linear)


def planned(params):
    """Make an optimizer with a schedule, which is not returned to who would step it."""
    optimizer = SGD(params)
    optimizer.plan = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return optimizer


class Unrelated:
    """An optimizer that is none of torch's."""

    def __init__(self, params):
        self.param_groups = [{"params": list(params)}]

    def step(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= 0.1 * p.grad

    def zero_grad(self):
        for p in self.param_groups[0]["params"]:
            p.grad = None


def by_closure(world, mesh, average=averaged):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def step(k):
        x, y = (own_part(x, mesh) for x in batch(k))

        def closure():
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            average(model)
            dist.all_reduce(loss := loss.detach().clone())
            return loss / mesh.sizes["dp"]

        return optimizer.step(closure)

    return model, optimizer, step


def half():
    model = mlp().float()
    forward = model.forward
    model.forward = lambda x: torch.autocast("cpu", torch.bfloat16)(forward)(x.float())
    return model


def layerwise(params):
    first, second, *rest = params
    return torch.optim.SGD([{"params": [first, second], "lr": 0.01}, {"params": rest}], lr=0.1)


def dropping(module, mesh):
    torch.manual_seed(mesh.world.rank)
    return module


DP, TP, PP = {"dp": 2}, {"tp": 2}, {"pp": 2}
RIGHT = {
    "fsdp, optimizer made before": (DP, partial(train, wrap=sharded, before=True)),
    "pipeline": (PP, pipelined),
    "pipeline without placements": (PP, partial(pipelined, own_names=True)),
    "torch's zero": (DP, partial(train, optimizer=torchs_zero, after=averaged)),
    "flat shards": (DP, partial(train, wrap=flat_sharded)),
    "dtensors": (TP, partial(train, wrap=dtensors)),
    "plain calls, 3 ranks": ({"dp": 3}, partial(train, after=averaged)),
    "cut by hand": (TP, by_hand),
    "a checkpoint": (DP, saved),
    "a closure": (DP, by_closure),
    "autocast": (DP, partial(train, model=half, after=averaged)),
    "an optimizer that is none of torch's": (DP, partial(train, after=averaged, optimizer=Unrelated)),
    "rates by layer": (DP, partial(train, after=averaged, optimizer=layerwise)),
}
WRONG = {  # mesh, training, and words of the verdict
    "summed": (
        DP,
        partial(train, after=lambda model: [dist.all_reduce(p.grad) for p in model.parameters()]),
        "2 times the right one: summed over dp",
    ),
    "other samples along tp": (
        TP,
        partial(train, wrap=cut, part=lambda x, mesh: x.chunk(2)[mesh.coordinates.tp]),
        "ranks 0 and 1 (tp) must see the same samples, and don't",
    ),
    "no gradient": (DP, partial(train, after=nn.Module.zero_grad), "no parameter has a gradient"),
    "a closure that nobody averages": (
        DP,
        partial(by_closure, average=lambda model: None),
        "each of ranks 0 and 1 (dp) keeps its own: nobody averages them",
    ),
    "no schedule.step": (
        DP,
        partial(train, after=averaged, optimizer=planned),
        "the learning rate schedule StepLR was never stepped",
    ),
    "dropout a rank": (
        TP,
        partial(train, model=partial(mlp, nn.Dropout(0.3)), wrap=dropping),
        "ranks 0 and 1 (tp) draw other random numbers",
    ),
    "a checkpoint without weights": (DP, partial(saved, forgets="model"), "doesn't restore 0.weight"),
    "a checkpoint without the optimizer": (
        DP,
        partial(saved, forgets="optimizer"),
        "is the optimizer's state",
    ),
}
