"""ZeRO-1 and FSDP training steps against torch's: the same model, batch and optimizer, in the same processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minipar
from benchmarks.harness import Row, Step, Times, on_cuda, race, row, run, worlds
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.data_parallel import FSDP, ZeroOptimizer
from minipar.model import Transformer
from minipar.model.block import Block
from minipar.support.trace import Trace, overlap_fraction

COMPUTE_S = 0.01  # an emulated unit's forward; its backward takes twice as long
CONFIG = ModelConfig(dim=512, num_layers=6, num_heads=8)  # about 20 million parameters


def rows(quick: bool = False) -> list[Row]:
    """Race Adam steps of ~20 M parameters; one thread and 2 samples of 64 tokens per rank, so communication matters."""
    rounds = 3 if quick else 11
    found = []
    for p in worlds():
        minipar.shutdown()  # fully_shard needs a world of exactly its ranks
        times = run(_race_zero, rounds, world_size=p)
        found.append(row(f"ZeRO-1 step, {p} ranks", times, 1.0, "against ZeroRedundancyOptimizer"))
        found.append(_fsdp_row(p, rounds))
        if not on_cuda():  # a GPU does not need sleeping units
            found.append(_prefetch_row(p, rounds))
    minipar.shutdown()
    return found


def _race_zero(world: Comm, rounds: int) -> Times:
    return race(world, _zero_step(world), _torch_zero_step(world), rounds)


def _zero_step(world: Comm) -> Step:
    model = Transformer(CONFIG, device=world.device)
    return _stepper(world, model, ZeroOptimizer(model.parameters(), torch.optim.Adam, world, lr=1e-3))


def _torch_zero_step(world: Comm) -> Step:
    group = world.process_group()
    model = DistributedDataParallel(
        Transformer(CONFIG, device=world.device), process_group=group, gradient_as_bucket_view=True
    )
    return _stepper(
        world, model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, group, lr=1e-3)
    )


def _fsdp_row(p: int, rounds: int) -> Row:
    results = run(_race_fsdp, rounds, world_size=p)
    ours, theirs = (max(peaks) / 2**20 for peaks in zip(*(peaks for _, peaks in results)))
    note = (
        f"against fully_shard; peak memory {ours:.0f} MB against {theirs:.0f}: {ours / theirs:.2f}, at most 1"
    )
    return row(f"FSDP step, {p} ranks", [times for times, _ in results], 1.0, note)


def _race_fsdp(world: Comm, rounds: int) -> tuple[Times, list[int]]:
    """Return the times, and the peak bytes of a step on each side, including shards and optimizer state."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    ours, theirs = _fsdp_step(world), _torch_fsdp_step(world, mesh)
    times = race(world, ours, theirs, rounds)
    return times, [_peak(step) for step in (ours, theirs)]


def _fsdp_step(world: Comm, **options: Any) -> Step:
    model = FSDP(Transformer(CONFIG, device=world.device), world, units=Block, **options)
    return _stepper(world, model, torch.optim.Adam(model.parameters(), lr=1e-3))


def _torch_fsdp_step(world: Comm, mesh: DeviceMesh) -> Step:
    model = Transformer(CONFIG, device=world.device)
    for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
        fully_shard(module, mesh=mesh)
    return _stepper(world, model, torch.optim.Adam(model.parameters(), lr=1e-3))


def _peak(step: Step) -> int:
    with _Peak() as memory:
        step()
    peak: int = memory.peak
    return peak


def _prefetch_row(p: int, rounds: int) -> Row:
    """Race prefetch against none, with sleeping units, since ranks on two cores cannot compute and communicate at once."""
    results = run(_race_prefetch, rounds, world_size=p)
    hidden = [sum(fractions) / p for fractions in zip(*(fractions for _, fractions in results))]
    note = f"emulated compute; communication hidden {hidden[0]:.0%} against {hidden[1]:.0%}"
    return row(f"FSDP prefetch against none, {p}", [times for times, _ in results], 1.0, note)


def _race_prefetch(world: Comm, rounds: int) -> tuple[Times, list[float]]:
    ours, theirs = _emulated_step(world, prefetch=True), _emulated_step(world, prefetch=False)
    times = race(world, ours, theirs, rounds)
    return times, [_hidden(world, step) for step in (ours, theirs)]


def _emulated_step(world: Comm, prefetch: bool) -> Step:
    torch.manual_seed(0)
    fsdp = FSDP(
        torch.nn.Sequential(*(_Sleeping() for _ in range(6))), world, units=_Sleeping, prefetch=prefetch
    )

    def step() -> None:
        fsdp(torch.ones(1, 1, requires_grad=True, device=world.device)).sum().backward()

    return step


class _Sleeping(torch.nn.Module):
    """A unit with eight megabytes of parameters that sleeps instead of computing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2**21))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        time.sleep(COMPUTE_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(2 * COMPUTE_S)
        return dx, torch.zeros_like(*ctx.saved_tensors)


def _hidden(world: Comm, step: Step) -> float:
    """Run a step; return the fraction of its communication time in which this rank also computed."""
    world.trace = trace = Trace()
    with trace.span("compute", "step"):
        step()
    world.trace = None
    return overlap_fraction(trace.spans)


def _stepper(world: Comm, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(world.rank)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 64), generator=generator).to(world.device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step


class _Peak(TorchDispatchMode):
    """Measures peak memory: after each operation, adds up the sizes of all storages that operations have made or received.

    Both sides free memory by `resize_(0)`, which `LiveBytes` does not see.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._seen: dict[int, Any] = {}  # storage -> weak pointer to it

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor):
                storage = getattr(x, "_local_tensor", x).untyped_storage()  # a DTensor's own has no memory
                if storage._cdata not in self._seen:
                    self._seen[storage._cdata] = storage._weak_ref()
        self.peak = max(self.peak, sum(map(_bytes_behind, self._seen.values())))
        return result


def _bytes_behind(weak_pointer: Any) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(weak_pointer)
    return 0 if storage is None else storage.nbytes()
