"""A training script for one process, and the ways to split its work over ranks, each a class with what it changes.

`setup(world, mesh)` returns (model, optimizer, step): the model as the script calls it, and `step(k)`, which trains on
batch k and returns the loss of the whole batch. `world` is None in one process. torch's wrappers and plain calls use
torch's default group, which must be of the world's ranks. All is in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import minipar
from minipar.comm import Comm
from minipar.mesh import Mesh
from minipar.tensor_parallel import tensor_parallel

Trained = tuple[nn.Module, torch.optim.Optimizer, Callable[[int], Tensor]]
Setup = Callable[[Comm | None, Mesh], Trained]


Sizes = dict[str, int]
RIGHT: dict[str, tuple[Sizes, Setup]] = {}  # the mesh to run it on, and the training
WRONG: dict[str, tuple[Sizes, Setup, str]] = {}  # and words of the verdict


class Script:
    """The script for one process. A task adds the model and the batches; a way overrides what changes on ranks."""

    def __init__(self, world: Comm | None, mesh: Mesh):
        self.world, self.mesh = world, mesh
        # Before `world` has an axis, one process has all the data.
        self.rank = 0 if world is None else mesh.coordinates.dp
        self.size = mesh.sizes["dp"]

    # The task: a model, batches, and what is summed over samples.

    def build(self) -> nn.Module: ...

    def batch(self, k: int) -> tuple[Tensor, ...]:
        """Return the tensors of the k-th global batch, each with the samples in its first dimension."""

    def loss_sum(self, model: nn.Module, *samples: Tensor) -> Tensor: ...

    def count(self, *samples: Tensor) -> Tensor:
        """Return the number of the losses that `loss_sum` adds up."""

    def is_decayed(self, name: str, parameter: Tensor) -> bool:
        return parameter.dim() >= 2

    units: tuple[type[nn.Module], ...] = ()
    plan: dict[str, Any] = {}

    # The script.

    def setup(self) -> Trained:
        torch.manual_seed(self.seed())
        self.model = self.build().double()
        self.decayed = {name: self.is_decayed(name, p) for name, p in self.model.named_parameters()}
        self.called = self.wrap()
        self.optimizer = self.make_optimizer()
        self.schedule = self.make_schedule()
        return self.called, self.optimizer, self.step

    def seed(self) -> int:
        return 0

    def wrap(self) -> nn.Module:
        return self.model

    def groups(self) -> list[dict[str, Any]]:
        """Return the trained parameters in two groups, matrices with weight decay."""
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        found = []
        for decayed, decay in ((True, 0.1), (False, 0.0)):
            named = [(name, p) for name, p in trained if self.decayed[name] == decayed]
            found += [{"params": named, "weight_decay": decay}] if named else []
        return found

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.groups(), lr=0.03)

    def make_schedule(self, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return a warm-up over three steps, of the script's optimizer or of another one."""
        of = self.optimizer if optimizer is None else optimizer
        return torch.optim.lr_scheduler.LambdaLR(of, lambda k: min(1.0, (k + 1) / 3))

    def step(self, k: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.backward(k)
        self.average()
        self.clip()
        self.optimizer.step()
        self.schedule.step()
        return self.reported(loss.detach())

    def part(self, k: int) -> list[Tensor]:
        """Return this rank's samples of batch k."""
        return [x.tensor_split(self.size)[self.rank] for x in self.batch(k)]

    def loss(self, k: int) -> Tensor:
        """Return the loss whose mean over the data-parallel ranks is that of the batch, however the counts are spread."""
        return self.loss_sum(self.called, *self.part(k)) * self.size / self.count(*self.batch(k))

    def backward(self, k: int) -> Tensor:
        loss = self.loss(k)
        loss.backward()
        return loss

    def average(self) -> None:
        """Average the gradients over ranks, where neither the model nor the optimizer does it."""

    max_norm = 0.5

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def reported(self, loss: Tensor) -> Tensor:
        return loss


class OwnMeans(Script):
    """A rank's loss is the mean over its own samples."""

    def loss(self, k: int) -> Tensor:
        part = self.part(k)
        return self.loss_sum(self.called, *part) / self.count(*part)


# Ways of this library --------------------------------------------------------------------------------------------------


class Ours(Script):
    @property
    def dp(self) -> Comm:
        return self.mesh.comm("dp")

    def reported(self, loss: Tensor) -> Tensor:
        return self.dp.all_reduce(loss, "mean")


class OursDDP(Ours):
    def wrap(self) -> nn.Module:
        return minipar.DDP(self.model, self.dp)


class OursZero(Ours):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return minipar.ZeroOptimizer(self.groups(), torch.optim.AdamW, self.dp, lr=0.03)

    def clip(self) -> None:
        minipar.clip_grad_norm_(self.optimizer.shards, self.max_norm, self.dp)


class OursFSDP(Ours):
    def wrap(self) -> nn.Module:
        return minipar.FSDP(self.model, self.dp, units=self.units)

    def clip(self) -> None:
        minipar.clip_grad_norm_(self.model.parameters(), self.max_norm, self.dp)


class OursTP(Ours):
    def wrap(self) -> nn.Module:
        tensor_parallel(self.model, self.mesh.comm("tp"), plan=self.plan)
        return self.model

    def clip(self) -> None:
        minipar.clip_grad_norm_(self.model.parameters(), self.max_norm, self.mesh.comm("tp"))


class OursTPAndDDP(OursTP):
    def wrap(self) -> nn.Module:
        return minipar.DDP(super().wrap(), self.dp)


# Ways of torch ---------------------------------------------------------------------------------------------------------


class Plain(Script):
    """Calls of torch.distributed, and nothing else: rank 0's values at the start, and an average after each backward."""

    def wrap(self) -> nn.Module:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        return self.model

    def average(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.size

    def reported(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss)
        return loss / self.size


class TorchDDP(Plain):
    def wrap(self) -> nn.Module:
        return DistributedDataParallel(self.model)

    def average(self) -> None: ...


class TorchFSDP(TorchDDP):
    def wrap(self) -> nn.Module:
        for module in self.model.modules():
            if isinstance(module, self.units):
                fully_shard(module)
        return fully_shard(self.model)


def train(world: Comm | None, mesh: Mesh, task: type, way: type = Script, change: type = Script) -> Trained:
    """Set up a task; on ranks in a way, with what `change` overrides."""
    bases = [task] if world is None else [b for b in (change, way, task) if b is not Script]
    return type(task.__name__, tuple(dict.fromkeys(bases)), {})(world, mesh).setup()


def right(task: type) -> type:
    """Put a task, in every way, among the right scripts."""
    ways = {way: {"dp": 2} for way in (OursDDP, OursZero, OursFSDP, TorchDDP, TorchFSDP, Plain)}
    if task.plan:
        ways |= {OursTP: {"tp": 2}, OursTPAndDDP: {"dp": 2, "tp": 2}}
    for way, sizes in ways.items():
        RIGHT[f"{task.__name__}, {way.__name__}"] = sizes, partial(train, task=task, way=way)
    return task


def wrong(words: str, way: type, task: type, **sizes: int) -> Callable[[type], type]:
    """Put a task in a way, with what a class changes on ranks, among the wrong scripts.

    What is itself a task changes one process, too.
    The class's docstring says the mistake, `words` are the verdict's.
    """

    def keep(change: type) -> type:
        of = {"task": change} if issubclass(change, task) else {"task": task, "change": change}
        WRONG[change.__name__] = sizes or {"dp": 2}, partial(train, way=way, **of), words
        return change

    return keep
