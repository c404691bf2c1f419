"""The training loop, on every rank, and the run around it."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from minipar.data_parallel import DDP
from minipar.launch import init_from_env, run
from minipar.mesh import Mesh
from minipar.model import Transformer, generate
from minipar.trace import Span, Trace, span, write_chrome_trace
from minipar.train.config import TrainConfig
from minipar.train.optim import clip_grad_norm_, learning_rate, parameter_groups
from minipar.train.record import gather_values, prepare_folder, write_metrics, write_whole
from minipar.train.reference import Difference, Run, compare, train_in_one_process
from minipar.train.text import batch_of_step, load_text, require_samples

SAMPLE_PROMPT = "The "


@dataclass
class Result:
    """What `train` returns: where it wrote, metrics a step, a trace a rank, a sample, the distance from one process."""

    folder: Path
    metrics: list[dict]
    traces: dict[int, list[Span]]
    sample: str
    difference: Difference | None
    reference: Run | None


def train(config: TrainConfig, on_progress=None) -> Result | None:
    """Train on `config.world_size` local ranks, or as one of torchrun's; then repeat the first steps on one process.

    on_progress(what, metrics)  called after every step, with what = "train" or "verify"
    Returns the result; under torchrun None on all ranks but the first.
    Raises ValueError for bad input before any rank starts, RankError where a rank fails.
    """
    text = load_text(config.text)
    require_samples(text, config.seq_len, config.text)
    prepare_folder(config.folder)
    tell = on_progress or (lambda what, metrics: None)
    if "RANK" in os.environ:
        world = init_from_env(timeout_s=config.timeout_s)
        _require_world(world.size, config)
        trained = train_rank(world, config, text, lambda metrics: tell("train", metrics))
    else:
        trained = run(
            train_rank, config, text, world_size=config.world_size, timeout_s=config.timeout_s,
            on_report=lambda rank, metrics: tell("train", metrics),
        )[0]  # fmt: skip
    return None if trained is None else _finish(config, text, trained, tell)


def _require_world(size: int, config: TrainConfig) -> None:
    if size != config.world_size:
        raise ValueError(f"{config.mesh_name} needs {config.world_size} ranks, and torchrun started {size}")


def train_rank(world, config: TrainConfig, text: torch.Tensor, report=None):
    """One rank's part of the run. Rank 0 returns (metrics, first steps, traces, sample), the others None."""
    report = report or world.report
    mesh = Mesh(world, dp=config.dp)
    torch.manual_seed(config.seed)
    model = Transformer(config.model, seed=config.seed, device=world.device, dtype=config.torch_dtype)
    ddp = DDP(
        model, mesh.comm("dp"), bucket_mb=config.bucket_mb, first_bucket_mb=config.bucket_mb / 4, reduce="sum"
    )
    groups = parameter_groups(model.named_parameters(), config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))
    metrics, first, trace = [], None, Trace()
    for step in range(config.steps):
        world.trace = trace if _traced(config, step) else None
        metrics.append(_step(world, mesh, config, text, ddp, optimizer, step))
        if world.rank == 0:
            report(metrics[-1])
        if step + 1 == min(config.verify_steps, config.steps):
            first = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    world.trace = None
    traces = gather_values(world, trace.spans)
    if world.rank:
        return None
    return metrics, first, dict(enumerate(traces)), _sample(model)


def _traced(config: TrainConfig, step: int) -> bool:
    middle = config.steps // 2
    return middle <= step < middle + config.trace_steps


def _step(world, mesh, config: TrainConfig, text, ddp: DDP, optimizer, step: int) -> dict:
    """Forward and backward over this rank's samples, clip, update: what every line of the metrics describes."""
    start_s = time.perf_counter()
    lr = learning_rate(step, config.steps, config.lr, config.warmup)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    loss = world.all_reduce(_gradients(world, mesh, config, text, ddp, step))
    with span(world.trace, "compute", "optimizer"):
        norm = clip_grad_norm_(ddp.parameters(), config.grad_clip or float("inf"))
        optimizer.step()
    seconds = time.perf_counter() - start_s
    tokens_per_s = config.batch_size * config.seq_len / seconds
    return {
        "step": step,
        "loss": loss.item(),
        "grad_norm": norm.item(),
        "lr": lr,
        "tokens_per_s": tokens_per_s,
        "seconds": seconds,
    }


def _gradients(world, mesh, config: TrainConfig, text, ddp: DDP, step: int) -> torch.Tensor:
    """Accumulate this rank's gradients; return its part of the loss, which is a sum over ranks."""
    batch = batch_of_step(text, config.seed, step, config.batch_size, config.seq_len)
    samples = torch.arange(config.batch_size).chunk(config.dp)[mesh.coordinates.dp].chunk(config.microbatches)
    total = torch.zeros((), dtype=torch.promote_types(config.torch_dtype, torch.float32), device=world.device)
    for i, ids in enumerate(samples):
        last = i == len(samples) - 1
        with nullcontext() if last else ddp.no_sync():
            with span(world.trace, "compute", "forward"):
                tokens, targets = (x[ids].to(world.device) for x in (batch.tokens, batch.targets))
                loss = ddp.module.loss(
                    tokens, targets, sample_ids=ids.to(world.device), step=step, count=batch.count
                )
            with span(world.trace, "compute", "backward"):
                loss.backward()
        total += loss.detach()
    return total


def _sample(model: Transformer, num_bytes: int = 300) -> str:
    prompt = torch.tensor(list(SAMPLE_PROMPT.encode()))
    tokens = generate(model, prompt, num_bytes, temperature=0.7).clamp(max=255)
    return bytes(tokens.tolist()).decode(errors="replace")


def _finish(config: TrainConfig, text, trained, tell) -> Result:
    """Write what the run made, then run its first steps again on one process and compare."""
    metrics, first, traces, sample = trained
    folder = config.folder
    write_metrics(folder, metrics)
    write_whole(folder / "sample.txt", sample + "\n")
    write_chrome_trace(folder / "trace.json", traces)
    steps = min(config.verify_steps, config.steps)
    difference = reference = None
    if steps:
        reference = run(
            _reference_rank, config, text, steps, world_size=1,
            on_report=lambda rank, step: tell("verify", {"step": step}),
        )[0]  # fmt: skip
        lines = metrics[:steps]
        difference = compare(
            Run([line["loss"] for line in lines], [line["grad_norm"] for line in lines], first), reference
        )
    return Result(folder, metrics, traces, sample, difference, reference)


def _reference_rank(world, config: TrainConfig, text, steps: int) -> Run:
    """The plain loop, in a process of its own so that it has one thread whatever the caller has."""
    return train_in_one_process(config, text, steps, on_step=world.report)
