"""ZeRO-1 and FSDP training steps against torch's: the same model, batch and optimizer, in the same processes."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minipar
from benchmarks.harness import Row, on_cuda, race, row, run, worlds
from minipar.data_parallel import FSDP, ZeroOptimizer
from minipar.model import ModelConfig, Transformer
from minipar.model.block import Block
from minipar.trace import Trace, overlap_fraction

COMPUTE_S = 0.01  # of an emulated unit's forward; its backward takes twice as long
CONFIG = ModelConfig(dim=512, num_layers=6, num_heads=8)  # about 20 million parameters


def rows(quick: bool = False) -> list[Row]:
    """Adam at ~20 M parameters, one thread per rank, 2 samples of 64 tokens each, so that communication matters."""
    rounds = 3 if quick else 11
    found = []
    for p in worlds():
        minipar.shutdown()  # fully_shard needs a world of exactly its ranks
        times = run(_race_zero, rounds, world_size=p)
        found.append(row(f"ZeRO-1 step, {p} ranks", times, 1.0, "against ZeroRedundancyOptimizer"))
        found.append(_fsdp_row(p, rounds))
        if not on_cuda():  # a GPU has no need of units that sleep
            found.append(_prefetch_row(p, rounds))
    minipar.shutdown()
    return found


def _race_zero(world, rounds: int):
    return race(world, _zero_step(world), _torch_zero_step(world), rounds)


def _zero_step(world):
    model = Transformer(CONFIG, device=world.device)
    return _stepper(world, model, ZeroOptimizer(model.parameters(), torch.optim.Adam, world, lr=1e-3))


def _torch_zero_step(world):
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


def _race_fsdp(world, rounds: int):
    """Times, then the peak bytes of a step of each, shards and optimizer state included."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    ours, theirs = _fsdp_step(world), _torch_fsdp_step(world, mesh)
    times = race(world, ours, theirs, rounds)
    return times, [_peak(step) for step in (ours, theirs)]


def _fsdp_step(world, **options):
    model = FSDP(Transformer(CONFIG, device=world.device), world, units=Block, **options)
    return _stepper(world, model, torch.optim.Adam(model.parameters(), lr=1e-3))


def _torch_fsdp_step(world, mesh):
    model = Transformer(CONFIG, device=world.device)
    for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
        fully_shard(module, mesh=mesh)
    return _stepper(world, model, torch.optim.Adam(model.parameters(), lr=1e-3))


def _peak(step) -> int:
    with _Peak() as memory:
        step()
    return memory.peak


def _prefetch_row(p: int, rounds: int) -> Row:
    """Race prefetch against none, on units that sleep: ranks sharing two cores cannot compute and communicate at once."""
    results = run(_race_prefetch, rounds, world_size=p)
    hidden = [sum(fractions) / p for fractions in zip(*(fractions for _, fractions in results))]
    note = f"emulated compute; communication hidden {hidden[0]:.0%} against {hidden[1]:.0%}"
    return row(f"FSDP prefetch against none, {p}", [times for times, _ in results], 1.0, note)


def _race_prefetch(world, rounds: int):
    steps = [_emulated_step(world, prefetch) for prefetch in (True, False)]
    return race(world, *steps, rounds), [_hidden(world, step) for step in steps]


def _emulated_step(world, prefetch: bool):
    torch.manual_seed(0)
    fsdp = FSDP(
        torch.nn.Sequential(*(_Sleeping() for _ in range(6))), world, units=_Sleeping, prefetch=prefetch
    )

    def step():
        fsdp(torch.ones(1, 1, requires_grad=True, device=world.device)).sum().backward()

    return step


class _Sleeping(torch.nn.Module):
    """A unit of eight megabytes of parameters that sleeps instead of computing a product with them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2**21))

    def forward(self, x):
        return _Sleep.apply(x, self.weight)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        time.sleep(COMPUTE_S)
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        time.sleep(2 * COMPUTE_S)
        return dx, torch.zeros_like(*ctx.saved_tensors)


def _hidden(world, step) -> float:
    """Run a step; return the fraction of its communication time in which this rank also computed."""
    world.trace = trace = Trace()
    with trace.span("compute", "step"):
        step()
    world.trace = None
    return overlap_fraction(trace.spans)


def _stepper(world, model, optimizer):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(world.rank)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 64), generator=generator).to(world.device)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step


class _Peak(TorchDispatchMode):
    """The largest total, after any operation, of the current sizes of all storages that operations made or received.

    Both sides free memory by `resize_(0)`, which `LiveBytes` would not see.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._seen: dict[int, int] = {}  # storage -> weak pointer to it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor):
                storage = getattr(x, "_local_tensor", x).untyped_storage()  # a DTensor's own has no memory
                if storage._cdata not in self._seen:
                    self._seen[storage._cdata] = storage._weak_ref()
        self.peak = max(self.peak, sum(map(_bytes_behind, self._seen.values())))
        return result


def _bytes_behind(weak_pointer: int) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(weak_pointer)
    return 0 if storage is None else storage.nbytes()
