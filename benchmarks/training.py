"""A training step: our attention against torch's in the same model, its MFU, and the communication it hides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Row, Step, Times, on_cuda, race, row, run, worlds
from minipar.comm import Comm
from minipar.comm.transport.cuda_trace import trace_on
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.cost.machines import MACHINES
from minipar.mesh import Mesh
from minipar.model.attention import Attention
from minipar.support.trace import Span, overlap_fraction, write_chrome_trace
from minipar.train.data.text import Text, load_data
from minipar.train.metrics import flops_per_token
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step

SMALL = ModelConfig(dim=128, num_layers=2, num_heads=4, max_seq_len=128)
# The model on a GPU: 0.8 billion parameters.
LARGE = ModelConfig(dim=2048, num_layers=16, num_heads=16, max_seq_len=2048)
TRACE = "gpu-trace.json"


def rows(quick: bool = False) -> list[Row]:
    """Race FSDP steps on each number of ranks, and on one rank; the note has TFLOP/s per rank, and MFU for a known GPU."""
    return [step_row(ranks, 3 if quick else 11, on_cuda() and not quick) for ranks in (1, *worlds())]


def step_row(ranks: int, rounds: int, large: bool) -> Row:
    model, samples = (LARGE, 4) if large else (SMALL, 2)
    config = TrainConfig(
        model=model, dp=ranks, zero=3 if ranks > 1 else 0, batch_size=samples * ranks,
        seq_len=model.max_seq_len, dtype="bfloat16" if large else "float32", steps=1000,
    )  # fmt: skip
    results = run(_race_attention, config, load_data(config)[0], rounds, world_size=ranks)
    made = row(
        f"training step, {ranks} {'rank' if ranks == 1 else 'ranks'}", [times for times, _, _ in results]
    )
    tflops = samples * config.seq_len * flops_per_token(model, config.seq_len) / made.ours_s / 1e12
    hidden = sum(overlap_fraction(spans) for _, spans, _ in results) / ranks
    note = f"{made.note}  {tflops:.2f} TFLOP/s a rank{_mfu(tflops, results[0][2])}"
    if on_cuda():
        write_chrome_trace(TRACE, {rank: spans for rank, (_, spans, _) in enumerate(results)})
    return made._replace(note=f"{note}, communication hidden {hidden:.0%}" if ranks > 1 else note)


def _mfu(tflops: float, gpu: str | None) -> str:
    """Return MFU as text: the fraction of the GPU's peak, if `cost/machines.py` knows the GPU."""
    for name, machine in MACHINES.items():
        if gpu is not None and name.split("-")[0] in gpu.lower():
            return f", MFU {tflops * 1e12 / machine.peak_flops:.1%} of {gpu}"
    return ""


def _race_attention(
    world: Comm, config: TrainConfig, text: Text, rounds: int
) -> tuple[Times, list[Span], str | None]:
    """Return the times of the steps, the spans of one step, and the GPU's name."""
    ours, theirs = (_step(world, config, text, core) for core in (None, _torch_attention))
    times = race(world, ours, theirs, rounds)
    world.trace = trace = trace_on(world.device)
    ours()
    world.trace = None
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return times, trace.spans, gpu


def _step(world: Comm, config: TrainConfig, text: Text, core: Callable[..., Tensor] | None) -> Step:
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    for stage in state.stages if core is not None else ():
        for module in stage.modules():
            if isinstance(module, Attention):
                module.overrides.core = core
    return partial(train_step, world, state, config, text, 0)


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
