"""A training step: our attention against torch's in the same model, its MFU, and the communication it hides."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import Row, on_cuda, race, row, run, worlds
from minipar.comm.cuda_trace import trace_on
from minipar.cost.machines import MACHINES
from minipar.mesh import Mesh
from minipar.model import ModelConfig
from minipar.trace import overlap_fraction, write_chrome_trace
from minipar.train import TrainConfig
from minipar.train.metrics import flops_per_token
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step
from minipar.train.text import load_data

SMALL = ModelConfig(dim=128, num_layers=2, num_heads=4, max_seq_len=128)
LARGE = ModelConfig(
    dim=2048, num_layers=16, num_heads=16, max_seq_len=2048
)  # 0.8 billion parameters, on a GPU
TRACE = "gpu-trace.json"


def rows(quick: bool = False) -> list[Row]:
    """FSDP on every number of ranks, and one rank; the note has TFLOP/s of a rank, and the MFU where its GPU is known."""
    rounds, large = 3 if quick else 11, on_cuda() and not quick
    model, samples, dtype = (LARGE, 4, "bfloat16") if large else (SMALL, 2, "float32")
    found = []
    for ranks in (1, *worlds()):
        config = TrainConfig(
            model=model, dp=ranks, zero=3 if ranks > 1 else 0, batch_size=samples * ranks,
            seq_len=model.max_seq_len, dtype=dtype, steps=1000,
        )  # fmt: skip
        results = run(_race_attention, config, load_data(config)[0], rounds, world_size=ranks)
        made = row(
            f"training step, {ranks} {'rank' if ranks == 1 else 'ranks'}", [times for times, _, _ in results]
        )
        tflops = samples * config.seq_len * flops_per_token(model, config.seq_len) / made.ours_s / 1e12
        hidden = sum(overlap_fraction(spans) for _, spans, _ in results) / ranks
        note = f"{made.note}  {tflops:.2f} TFLOP/s a rank{_mfu(tflops, results[0][2])}"
        found.append(made._replace(note=f"{note}, communication hidden {hidden:.0%}" if ranks > 1 else note))
        if on_cuda():
            write_chrome_trace(TRACE, {rank: spans for rank, (_, spans, _) in enumerate(results)})
    return found


def _mfu(tflops: float, gpu: str | None) -> str:
    """The fraction of the peak of a GPU that `cost/machines.py` knows."""
    for name, machine in MACHINES.items():
        if gpu is not None and name.split("-")[0] in gpu.lower():
            return f", MFU {tflops * 1e12 / machine.peak_flops:.1%} of {gpu}"
    return ""


def _race_attention(world, config: TrainConfig, text, rounds: int):
    """Times of a step, the spans of one, and the GPU's name."""
    ours, theirs = (_step(world, config, text, core) for core in (None, _torch_attention))
    times = race(world, ours, theirs, rounds)
    world.trace = trace = trace_on(world.device)
    ours()
    world.trace = None
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return times, trace.spans, gpu


def _step(world, config: TrainConfig, text, core):
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    for stage in state.stages if core is not None else ():
        for block in stage.layers.values():
            block.attention.overrides.core = core
    return partial(train_step, world, state, config, text, 0)


def _torch_attention(q, k, v, *args, **options):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
