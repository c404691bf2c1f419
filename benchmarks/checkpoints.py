"""Memory, bytes read and written, and time on 4 ranks: to build a model, save it, load it, export it, generate with it."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import minipar
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh
from minipar.train.checkpoint.export import export_model
from minipar.train.checkpoint.restore import Checkpoint
from minipar.train.checkpoint.saver import Saver
from minipar.train.parallelize import parallelize
from minipar.train.state import described, parts_of, restore
from minipar.train.text_generation import generate_on_mesh, load_stage

MODEL = ModelConfig(dim=768, num_layers=14, num_heads=12, max_seq_len=64)  # 99 million parameters, 398 MB
MESHES: dict[str, dict[str, Any]] = {
    "dp4 zero3": dict(dp=4, zero=3),
    "tp4": dict(tp=4),
    "pp4": dict(pp=4, microbatches=4),
    "dp2 tp2 zero1": dict(dp=2, tp=2, zero=1),
}
SAVED = "dp4 zero3"  # the row whose checkpoint the later rows read
TOKENS = 4


@dataclass
class Row:
    """One line of the table: seconds on the slowest rank; bytes held, at peak, read and written on the rank with the most.

    held  bytes that stay resident after the operation, beyond those before it
    peak  the most bytes resident during the operation, beyond those before it
    """

    name: str
    seconds: float
    held: int
    peak: int
    read: int
    written: int


class Usage(NamedTuple):
    seconds: float
    held: int
    peak: int
    read: int
    written: int


def rows(quick: bool = False) -> list[Row]:
    """Measure each operation in new processes that have only imported torch; `quick`: with a tenth of the layers."""
    model = replace(MODEL, num_layers=4) if quick else MODEL
    base = TrainConfig(model=model, batch_size=8, seq_len=64, steps=1)
    meshes = {name: replace(base, **sizes) for name, sizes in MESHES.items()}
    found = []

    def on_ranks(name: str, function: Callable[..., Usage], *args: Any, world_size: int = 4) -> None:
        minipar.shutdown()
        found.append(row(name, minipar.run(function, *args, world_size=world_size, timeout_s=300)))

    with tempfile.TemporaryDirectory() as folder:
        for name, config in meshes.items():
            on_ranks(f"build, {name}", build, config)
        on_ranks(f"save, {SAVED}", save, meshes[SAVED], folder)
        for name in ("dp4 zero3", "tp4"):
            on_ranks(f"load, {name}", load, meshes[name], folder)
        on_ranks("export, one process", export, folder, world_size=1)
        on_ranks("generate, tp4", generate, folder, 4, 1)
        on_ranks("generate, pp4", generate, folder, 1, 4)
    minipar.shutdown()
    return found


def row(name: str, by_rank: list[Usage]) -> Row:
    return Row(name, *(max(column) for column in zip(*by_rank)))


def print_table(title: str, lines: list[Row]) -> None:
    print(f"\n{title}\n{'MB of a rank':24}{'held':>9}{'at most':>9}{'read':>9}{'written':>9}{'seconds':>9}")
    for r in lines:
        megabytes = "".join(f"{x / 1e6:9.0f}" for x in (r.held, r.peak, r.read, r.written))
        print(f"{r.name:24}{megabytes}{r.seconds:9.1f}", flush=True)


# What is measured -----------------------------------------------------------------------------------------------------


def _mesh(world: Comm, config: TrainConfig) -> Mesh:
    return Mesh(world, **config.mesh_sizes)


def build(world: Comm, config: TrainConfig) -> Usage:
    return measured(lambda: parallelize(config, _mesh(world, config), world.device))


def save(world: Comm, config: TrainConfig, folder: str) -> Usage:
    """Save a state with both of AdamW's moments, which are zeros before any training."""
    state = parallelize(config, _mesh(world, config), world.device)
    for x, own in state.optimizer.tensors_and_states():
        own.update(step=x.new_tensor(1.0), exp_avg=x.detach().sin(), exp_avg_sq=x.detach().square())

    def write() -> Saver:
        saver = Saver(world, Path(folder))
        parts, numbers = parts_of(state)
        saver.save(1, parts, described(config), numbers)
        saver.finish()
        return saver

    return measured(write)


def load(world: Comm, config: TrainConfig, folder: str) -> Usage:
    """Build the model and load its state, moments included, as a resumed run does before its first step."""

    def resume() -> object:
        state = parallelize(config, _mesh(world, config), world.device)
        restore(state, Checkpoint(newest_path(folder)))
        return state

    return measured(resume)


def export(world: Comm, folder: str) -> Usage:
    return measured(lambda: export_model(Checkpoint(newest_path(folder)), Path(folder) / "model.safetensors"))


def generate(world: Comm, folder: str, tp: int, pp: int) -> Usage:
    """Load this rank's part of the weights, then generate a few tokens."""
    mesh = Mesh(world, tp=tp, pp=pp)

    def tokens() -> object:
        stage = load_stage(Checkpoint(newest_path(folder)), mesh, world.device)
        return stage, generate_on_mesh(stage, mesh, [1, 2, 3], TOKENS)

    return measured(tokens)


def newest_path(folder: str) -> Path:
    """Return the newest checkpoint without checking it; a check would read all of it."""
    return next(Path(folder).glob("step-*"))


def measured(operation: Callable[[], object]) -> Usage:
    """Run the operation and measure what this process needs for it (only Linux measures everything)."""
    trim()
    before, (read, written) = resident("VmRSS"), transferred()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    start_s = time.perf_counter()
    result = operation()
    seconds = time.perf_counter() - start_s
    peak, (read_then, written_then) = resident("VmHWM"), transferred()
    trim()
    held = resident("VmRSS") - before
    del result
    return Usage(seconds, held, peak - before, read_then - read, written_then - written)


def trim() -> None:
    """Give memory that Python and the allocator keep for later use back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident(kind: str) -> int:
    """Return this process's resident bytes: VmRSS for now, VmHWM for the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def transferred() -> tuple[int, int]:
    """Return the bytes that this process has read and written, through files, pipes and sockets together."""
    with open("/proc/self/io", "rb") as file:
        counts = dict(line.split(b": ") for line in os.read(file.fileno(), 4096).splitlines())
    return int(counts[b"rchar"]), int(counts[b"wchar"])
