"""Tensor parallelism against torch's DTensor, and a loss on split logits against one on gathered logits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import minipar
from benchmarks.harness import Row, Times, race, row, run, worlds
from minipar.comm import Comm, autograd
from minipar.config.model_config import ModelConfig
from minipar.model import Block, Linear, Transformer, cross_entropy_sum
from minipar.support.live_bytes import counted_bytes
from minipar.tensor_parallel import tensor_parallel, vocab_parallel_cross_entropy

SMALL = ModelConfig(vocab_size=256, dim=128, num_layers=4, num_heads=8, num_kv_heads=8)
MEDIUM = ModelConfig(vocab_size=8192, dim=256, num_layers=4, num_heads=8, num_kv_heads=8)
VOCAB, LOSS_TOKENS, LOSS_DIM = 32768, 1024, 64


def rows(quick: bool = False) -> list[Row]:
    """Race training steps of two models on 2 and 4 ranks, with sequence parallelism for information; then the loss."""
    models = {"0.9 M": (SMALL, 8, 128)} if quick else {"0.9 M": (SMALL, 8, 128), "7 M": (MEDIUM, 4, 256)}
    found = []
    for p in worlds():
        minipar.shutdown()  # a device mesh needs a world of exactly p processes
        for name, (config, batch, tokens) in models.items():
            for sequence_parallel in (False, True):
                times = run(
                    _race_steps, config, batch, tokens, sequence_parallel, 5 if quick else 15, world_size=p
                )
                kind, bar = ("TP+SP", None) if sequence_parallel else ("TP", 0.95)
                found.append(row(f"{kind} step, {name}, {p} ranks", times, bar))
            times = run(_race_chunked, config, batch, tokens, 5 if quick else 15, world_size=p)
            found.append(row(f"chunked vs whole, {name}, {p} ranks", times))
    return [*found, _loss_row(quick)] if 4 in worlds() else found


def _race_steps(
    world: Comm, config: ModelConfig, batch: int, tokens: int, sequence_parallel: bool, rounds: int
) -> Times:
    torch.set_num_threads(1)
    ours = tensor_parallel(Transformer(config, device=world.device), world, sequence_parallel)
    theirs = dtensor(
        Transformer(config, device=world.device),
        init_device_mesh(world.device.type, (world.size,)),
        sequence_parallel,
    )
    data = torch.randint(config.vocab_size, (2, batch, tokens), device=world.device)
    losses = [_step(ours, data, nullcontext), _step(theirs, data, loss_parallel)]
    losses = [loss.full_tensor() if hasattr(loss, "full_tensor") else loss for loss in losses]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)  # the same work, or the ratio means nothing
    return race(
        world, partial(_step, ours, data, nullcontext), partial(_step, theirs, data, loss_parallel), rounds
    )


def _race_chunked(world: Comm, config: ModelConfig, batch: int, tokens: int, rounds: int) -> Times:
    """Race sequence parallelism with chunked communication ("ours") against unchunked ("theirs")."""
    torch.set_num_threads(1)
    data = torch.randint(config.vocab_size, (2, batch, tokens), device=world.device)
    chunked, whole = (
        tensor_parallel(Transformer(config, device=world.device), world, True, chunked=c)
        for c in (True, False)
    )
    return race(
        world, partial(_step, chunked, data, nullcontext), partial(_step, whole, data, nullcontext), rounds
    )


def _step(
    model: Transformer, data: torch.Tensor, context: Callable[[], AbstractContextManager[None]]
) -> torch.Tensor:
    """Run one step with plain SGD, so that the optimizer adds little to the time."""
    with context():
        loss = model.loss(*data)
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.01)
            parameter.grad = None
    return loss.detach()


def dtensor(model: Transformer, device_mesh: DeviceMesh, sequence_parallel: bool) -> Transformer:
    """Cut the model by torch's `parallelize_module` over a one-dim device mesh, with torch's plan for a Llama."""
    warnings.filterwarnings("ignore", module="torch.distributed")
    size = device_mesh.size()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Linear):
                replaced = nn.Linear(layer.in_features, layer.out_features, bias=False)
                replaced.weight = layer.weight
                setattr(parent, name, replaced)
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        "norm": SequenceParallel(),
    }
    for name, block in model.layers.items():
        assert isinstance(block, Block)
        block.attention.num_heads //= size
        block.attention.num_kv_heads //= size
        for part in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
            plan[f"layers.{name}.{part}"] = ColwiseParallel()
        for part in ("attention.o", "mlp.down"):
            plan[f"layers.{name}.{part}"] = RowwiseParallel(output_layouts=between)
        for part in ("attention", "mlp"):
            plan[f"layers.{name}.{part}_norm"] = SequenceParallel()
        plan[f"layers.{name}.attention"] = PrepareModuleInput(
            input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
        )
        plan[f"layers.{name}.mlp"] = PrepareModuleInput(
            input_layouts=(between,), desired_input_layouts=(Replicate(),)
        )
    if not sequence_parallel:
        plan = {
            n: style
            for n, style in plan.items()
            if not isinstance(style, SequenceParallel | PrepareModuleInput)
        }
    parallelize_module(model, device_mesh, plan)
    return model


def _loss_row(quick: bool) -> Row:
    results = run(_race_losses, 5 if quick else 15, world_size=4)
    ours, theirs = results[0][1]
    note = (
        f"peak memory {ours / 2**20:.0f} MB against {theirs / 2**20:.0f}: {ours / theirs:.2f}, at most 0.33"
    )
    return row(f"split loss vs gathered, V={VOCAB}", [times for times, _ in results], 1.0, note)


def _race_losses(world: Comm, rounds: int) -> tuple[Times, list[int]]:
    torch.set_num_threads(1)
    torch.manual_seed(world.rank)
    hidden = torch.randn(LOSS_TOKENS, LOSS_DIM, requires_grad=True, device=world.device)
    weight = torch.randn(VOCAB // world.size, LOSS_DIM, requires_grad=True, device=world.device)
    targets = torch.randint(VOCAB, (LOSS_TOKENS,), generator=torch.Generator().manual_seed(0)).to(
        world.device
    )

    def split() -> None:
        vocab_parallel_cross_entropy(world, hidden @ weight.t(), targets, reduction="sum").backward()
        hidden.grad = weight.grad = None

    def gathered() -> None:
        logits = autograd.gather(world, hidden @ weight.t(), dim=-1)
        cross_entropy_sum(logits, targets).backward()
        hidden.grad = weight.grad = None

    peaks = []
    for loss in (split, gathered):
        with counted_bytes(world.device) as memory:
            loss()
        peaks.append(memory.peak)
    return race(world, split, gathered, rounds), peaks
