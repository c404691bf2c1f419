"""What only a GPU can say, in ten minutes: `make bench-gpu` writes docs/gpu.md, and its figures and pictures.

    products   the rate of a bf16 matrix product by shape, beside the rate that the planner assumes
    beside     what a copy or an all-reduce at the same time costs a product, and what the product costs them
    launches   a forward pass launched kernel by kernel, and as one CUDA graph
    training   a model of 0.8 billion parameters on one GPU: TFLOP/s and MFU, our attention against torch's
    steps      a traced step of DDP, ZeRO-3, tensor parallelism and 1F1B on two ranks, and the memory it allocates
    races      DDP, ZeRO, tensor parallelism and collectives against torch's, on as many ranks as NCCL can serve
    serving    a Llama of 1.2 billion parameters: tokens per second by the number of requests, beside the memory's bound

A section that fails is said in words on the page, and the others go on. `--device cpu` runs the same code on small sizes,
with plain calls in place of graphs: so that a GPU's minutes are not spent on typing errors.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from torch import Tensor

import minipar
from benchmarks import collectives, data_parallel, tensor_parallel, training, zero
from benchmarks.harness import Row, _device, run, worlds
from benchmarks.transformers_serving import random_llama
from minipar.comm import Comm
from minipar.comm.transport.cuda_trace import trace_on
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.cost.machines import MACHINES, Machine
from minipar.inference import Engine, Options, Request
from minipar.mesh import Mesh
from minipar.runtime import devices
from minipar.support.trace import Span, busy_s, overlap_fraction
from minipar.train.data.text import Text, load_data
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step
from minipar.visualize.style import BLUE, new_figure, quiet, write
from minipar.visualize.trace import draw_trace

DOCS = Path(__file__).parent.parent / "docs"
GB = 1e9


class Gpu(NamedTuple):
    """The device to measure on; `cuda` False: a CPU, which goes through the same calls on small sizes."""

    cuda: bool
    out: Path

    @property
    def device(self) -> str:
        return "cuda" if self.cuda else "cpu"

    def of(self, large: int, small: int) -> int:
        return large if self.cuda else small

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def machine(self) -> Machine:
        """Return the planner's description of this GPU, or of an H100 where it knows none."""
        name = torch.cuda.get_device_name(0).lower() if self.cuda else ""
        return next((m for m in MACHINES.values() if m.name.split("-")[0] in name), MACHINES["h100"])

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], object], calls: int = 10) -> float:
        """Return the seconds of a call: the median of five rounds of so many calls, after an untimed round."""
        rounds = []
        for _ in range(6):
            self.wait()
            start_s = time.perf_counter()
            for _ in range(calls):
                function()
            self.wait()
            rounds.append((time.perf_counter() - start_s) / calls)
        return sorted(rounds[1:])[2]

    def graph(self, function: Callable[[], object]) -> Callable[[], object]:
        """Return a call that replays the kernels of `function`; on a CPU, `function`."""
        if not self.cuda:
            return function
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # what libraries allocate at the first call must not be in the graph
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay


Table = list[dict[str, Any]]  # a row: column -> value


# What one GPU does alone ---------------------------------------------------------------------------------------------


def products(gpu: Gpu) -> Table:
    """The rate of a matrix product in bf16, beside the planner's: `matmul_fraction` of the peak, or the memory's time."""
    machine, rows = gpu.machine(), []
    whole = [(n, n, n) for n in (512, 1024, 2048, 4096, 8192)]
    sliced = [(4096, 8192, 28672 // tp) for tp in (1, 2, 4, 8)]  # an MLP's column of a Llama of 70 billion
    few = [(tokens, 4096, 4096) for tokens in (1, 16, 64, 256, 1024)]  # as in serving
    for m, k, n in [*whole, *sliced, *few]:
        m, k, n = (size if gpu.cuda else max(1, size // 64) for size in (m, k, n))
        a, b = gpu.randn(m, k), gpu.randn(k, n)
        out = gpu.randn(m, n)
        seconds = gpu.seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), gpu.of(20, 2))  # type: ignore[misc]
        flops, moved = 2 * m * k * n, 2 * (m * k + k * n + m * n)
        planned_s = max(
            flops / (machine.peak_flops * machine.matmul_fraction), moved / machine.hbm_bytes_per_s
        )
        rows.append({
            "tokens x in x out": f"{m} x {k} x {n}", "µs": seconds * 1e6, "TFLOP/s": flops / seconds / 1e12,
            "of the peak": flops / seconds / machine.peak_flops, "GB/s": moved / seconds / GB,
            "time / planner's": seconds / planned_s,
        })  # fmt: skip
    return rows


def beside(gpu: Gpu) -> Table:
    """A product of 8192 x 8192 x 8192, ten in a row, with something else on a second stream all the while."""
    n, num_bytes = gpu.of(8192, 64), gpu.of(2**30, 2**12)
    a, b, out = gpu.randn(n, n), gpu.randn(n, n), gpu.randn(n, n)
    x, y = (torch.empty(num_bytes, dtype=torch.uint8, device=gpu.device) for _ in range(2))
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=gpu.cuda)

    def product() -> None:
        for _ in range(10):
            torch.mm(a, b, out=out)

    others = {
        "copy inside the GPU": (lambda: x.copy_(y, non_blocking=True), gpu.of(15, 2)),
        "copy from the host": (lambda: x.copy_(host, non_blocking=True), 1),
        "copy to the host": (lambda: host.copy_(x, non_blocking=True), 1),
        "an addition of two such vectors": (lambda: torch.add(x, y, out=x), gpu.of(15, 2)),
    }
    side = torch.cuda.Stream() if gpu.cuda else None
    alone, rows = gpu.seconds(product, 1), []
    for name, (once, calls) in others.items():

        def other(once: Callable[[], object] = once, calls: int = calls) -> None:
            for _ in range(calls):
                once()

        def both(other: Callable[[], None] = other) -> None:
            if side is None:
                other()
            else:
                with torch.cuda.stream(side):
                    other()
            product()

        other_s, both_s = gpu.seconds(other, 1), gpu.seconds(both, 1)
        rows.append({
            "beside ten products": name, "products alone, ms": alone * 1e3, "the other alone, ms": other_s * 1e3,
            "GB/s": calls * num_bytes / other_s / GB, "both, ms": both_s * 1e3,
            "hidden": (alone + other_s - both_s) / min(alone, other_s),
        })  # fmt: skip
    return rows


def launches(gpu: Gpu) -> Table:
    """A forward pass of few tokens: what the host needs to launch it, and what the GPU needs once it is one graph."""
    rows = []
    for dim, layers in ((512, 8), (2048, 16)) if gpu.cuda else ((32, 2),):
        model = llama(gpu, dim, layers)
        for tokens in (1, 64, gpu.of(1024, 32)):
            x = torch.randint(256, (1, tokens), device=gpu.device)
            with torch.no_grad():
                eager_s = gpu.seconds(lambda model=model, x=x: model(x), gpu.of(20, 1))  # type: ignore[misc]
                graph_s = gpu.seconds(gpu.graph(lambda model=model, x=x: model(x)), gpu.of(20, 1))  # type: ignore[misc]
            rows.append({
                "model": f"{layers} layers of {dim}", "tokens": tokens, "launched, ms": eager_s * 1e3,
                "one graph, ms": graph_s * 1e3, "ratio": eager_s / graph_s,
            })  # fmt: skip
    x = torch.zeros(16, device=gpu.device)
    rows.append(
        {"model": "x.add_(1), 16 numbers", "launched, ms": gpu.seconds(lambda: x.add_(1), 1000) * 1e3}
    )
    return rows


def llama(gpu: Gpu, dim: int, layers: int) -> Any:
    config = ModelConfig(
        vocab_size=gpu.of(32000, 256), dim=dim, num_layers=layers, num_heads=dim // gpu.of(128, 16),
        max_seq_len=2048, attention="fused",
    )  # fmt: skip
    return random_llama(config, torch.bfloat16).to(gpu.device)


def train_alone(gpu: Gpu) -> Table:
    """A step on one GPU, ours with our attention against ours with torch's; MFU by the planner's peak."""
    return [_raced(training.step_row(1, 5, large=gpu.cuda))]


def serving(gpu: Gpu) -> Table:
    """Requests with 64 tokens of prompt and 64 new ones, all there from the start."""
    model, rows = llama(gpu, gpu.of(2048, 32), gpu.of(22, 2)), []
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    bound_s = held / gpu.machine().hbm_bytes_per_s
    new = gpu.of(64, 4)
    for number in (1, 8, 64) if gpu.cuda else (1, 2):
        requests = [Request(tuple((7 * i + j) % 256 for j in range(64)), new) for i in range(number)]
        options = Options(num_blocks=16 * number, token_budget=2048, max_running=number, prefix_cache=False)
        Engine(model, options).run(requests)
        gpu.wait()
        start_s = time.perf_counter()
        steps = len(_served(model, options, requests))
        gpu.wait()
        seconds = time.perf_counter() - start_s
        rows.append({
            "requests": number, "tokens/s": number * new / seconds, "steps": steps, "ms a step": seconds / steps * 1e3,
            "weights read, ms": bound_s * 1e3,
        })  # fmt: skip
    return rows


def _served(model: Any, options: Options, requests: list[Request]) -> list[Any]:
    engine = Engine(model, options)
    engine.run(requests)
    return list(engine.steps)


# What ranks do together ----------------------------------------------------------------------------------------------


def steps(gpu: Gpu) -> Table:
    """A step of a small model on two ranks; they share a GPU where there is one: their times are no cluster's."""
    model = ModelConfig(
        dim=gpu.of(1024, 32), num_layers=8, num_heads=gpu.of(8, 4), max_seq_len=gpu.of(1024, 64)
    )
    meshes: dict[str, dict[str, Any]] = {
        "DDP": dict(dp=2), "ZeRO-3": dict(dp=2, zero=3), "TP": dict(tp=2),
        "1F1B": dict(pp=2, microbatches=4, schedule="1f1b"),
    }  # fmt: skip
    rows: Table = []
    curves: dict[str, list[tuple[float, int]]] = {}
    for name, sizes in meshes.items():
        config = TrainConfig(
            model=model, batch_size=8, seq_len=model.max_seq_len, steps=1000,
            dtype="bfloat16" if gpu.cuda else "float32", **sizes,
        )  # fmt: skip
        try:
            by_rank = run(_traced, config, load_data(config)[0], world_size=2)
        except Exception as error:  # the other strategies go on
            rows.append({"strategy": name, "ms": _words(error)})
            continue
        spans, curves[name] = {r: seen[0] for r, seen in enumerate(by_rank)}, by_rank[0][1]
        picture = gpu.out / "generated" / f"gpu_step_{name.lower()}.png"
        draw_trace(spans, picture, f"{name}, two ranks on one {'GPU' if gpu.cuda else 'CPU'}")
        ends = [s.end_s for s in spans[0]]
        rows.append({
            "strategy": name, "ms": (max(ends) - min(s.start_s for s in spans[0])) * 1e3,
            "computing or waiting, ms": busy_s(spans[0], "compute") * 1e3,
            "communicating, ms": busy_s(spans[0], "communicate") * 1e3,
            "hidden": overlap_fraction(spans[0]), "held before, MB": curves[name][0][1] / 1e6 if curves[name] else None,
            "peak, MB": max(n for _, n in curves[name]) / 1e6 if curves[name] else None,
        })  # fmt: skip
    if any(curves.values()):
        draw_memory(curves, gpu.out / "generated" / "gpu_memory.png")
    return rows


def _traced(world: Comm, config: TrainConfig, text: Text) -> tuple[list[Span], list[tuple[float, int]]]:
    """Return the spans of a step, and (milliseconds, bytes allocated) after each allocation and release of another."""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    for step in range(3):
        train_step(world, state, config, text, step)
    world.barrier()
    world.trace = trace = trace_on(world.device)
    train_step(world, state, config, text, 3)
    world.trace = None
    if world.device.type != "cuda":
        return trace.spans, []
    held = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(context=None, max_entries=200_000)
    train_step(world, state, config, text, 4)
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][world.device.index]
    torch.cuda.memory._record_memory_history(enabled=None)
    curve = [(0.0, held)]
    for event in events:
        if event["action"] in ("alloc", "free_completed"):
            held += event["size"] if event["action"] == "alloc" else -event["size"]
            curve.append(((event["time_us"] - events[0]["time_us"]) / 1e3, held))
    return trace.spans, curve


def draw_memory(curves: dict[str, list[tuple[float, int]]], path: Path) -> None:
    figure = new_figure(13, 2.2 * len(curves))
    for axes, (name, curve) in zip(figure.subplots(len(curves), squeeze=False)[:, 0], curves.items()):
        at_ms, held = zip(*curve)
        axes.step(at_ms, [n / 1e6 for n in held], color=BLUE, where="post", linewidth=1)
        axes.fill_between(at_ms, [n / 1e6 for n in held], step="post", color=BLUE, alpha=0.2)
        axes.set_ylabel(f"{name}, MB")
        axes.set_ylim(0)
        quiet(axes, "y")
    axes.set_xlabel("ms of the host in a step of rank 0")
    write(figure, path)


def races(gpu: Gpu) -> Table:
    """Ours against torch's in the same processes; below 1, ours is faster."""
    found = []
    for module in (collectives, data_parallel, zero, tensor_parallel):
        try:
            found += [_raced(r) for r in module.rows(quick=True)]
        except Exception as error:  # the other tables go on
            found.append({"race": module.__name__, "note": _words(error)})
        print(f"  {module.__name__} done", flush=True)
    return found


def _raced(r: Row) -> dict[str, Any]:
    return {
        "race": r.name,
        "ours, ms": r.ours_s * 1e3,
        "torch's, ms": r.theirs_s * 1e3,
        "ratio": r.ratio,
        "note": r.note,
    }


SECTIONS = {
    "products": products, "launches": launches, "beside": beside, "serving": serving, "training": train_alone,
    "steps": steps, "races": races,
}  # fmt: skip


# The page ------------------------------------------------------------------------------------------------------------


def main(names: tyro.conf.Positional[tuple[str, ...]] = (), device: str = "cuda", out: Path = DOCS) -> int:
    """Measure what only a GPU can say; write gpu.md, and its figures and pictures in generated/.

    Args:
        names: the sections; all if none are given.
        device: cuda, or cpu: the same calls on small sizes, whose figures mean nothing.
        out: the folder to write to.
    """
    gpu = Gpu(device == "cuda", out)
    if gpu.cuda and (why := devices.why_not_nccl(1, devices.Machine.here())):
        print(f"nothing was measured: NCCL {why}")
        return 0
    (out / "generated").mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"about": about(gpu)}
    before, failed = _device.set(device), 0
    for name in names or SECTIONS:
        start_s = time.perf_counter()
        try:
            figures[name] = SECTIONS[name](gpu)
        except Exception as error:
            traceback.print_exc()
            figures[name], failed = f"failed: {_words(error)}", failed + 1
        print(f"{name}: {time.perf_counter() - start_s:.0f} s", flush=True)
        # After each section: a machine may be taken away.
        (out / "generated" / "gpu.json").write_text(json.dumps(figures, indent=1) + "\n")
        (out / "gpu.md").write_text("\n".join(page(figures, out)) + "\n")
    _device.reset(before)
    minipar.shutdown()
    return failed


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def about(gpu: Gpu) -> dict[str, Any]:
    here = devices.Machine.here()
    said: dict[str, Any] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "ranks tried": [1, *worlds()],
    }
    if gpu.cuda:
        said |= {
            "GPU": torch.cuda.get_device_name(0), "CUDA": torch.version.cuda, "NCCL": ".".join(map(str, here.nccl or ())),
            "planner's machine": gpu.machine().name,
        }  # fmt: skip
    return said


def page(figures: dict[str, Any], out: Path) -> Iterator[str]:
    yield from (
        "# What a GPU says",
        "",
        "Written by `make bench-gpu`; the figures are in generated/gpu.json.",
        "",
    )
    yield from (f"- {name}: {value}" for name, value in figures["about"].items())
    for name, rows in figures.items():
        if name == "about":
            continue
        yield from ("", f"## {name.capitalize()}", "", (SECTIONS[name].__doc__ or "").strip(), "")
        if isinstance(rows, str):
            yield rows
        else:
            columns = list(dict.fromkeys(column for row in rows for column in row))
            yield "| " + " | ".join(columns) + " |"
            yield "|---" * len(columns) + "|"
            yield from ("| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows)
        if name == "steps":
            for picture in sorted((out / "generated").glob("gpu_*.png")):
                yield from ("", f"![{picture.stem}](generated/{picture.name})")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
