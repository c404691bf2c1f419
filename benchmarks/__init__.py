"""Times against torch's own implementations, as ratios: `python -m benchmarks [name ...]`, or `minipar bench`.
On GPUs, against NCCL: `python -m benchmarks --device cuda`.

harness.py          time two implementations in turn, in one run, and print the table
collectives.py      collectives against gloo's
data_parallel.py    DDP steps against torch's
compress.py         cheap messages against torch's communication hooks
zero.py             ZeRO-1 and FSDP steps against torch's
tensor_parallel.py  tensor parallelism against DTensor
pipeline.py         pipelines against torch.distributed.pipelining, and against the simulator
expert.py           mixtures of experts against loops, torch's all-to-all and a dense model
context.py          ring attention against an all-gather and fused attention
checkpoints.py      memory, bytes and time to build, save, load, export and generate, compared with nothing
mesh.py             two mesh axes at once against torch's, and the cost of checkpoints
training.py         a training step's MFU, and how much of its communication it hides
inference.py        serving many requests with each idea, and without it
transformers_serving.py  the same requests and weights, served by transformers
peers/              steps of other programs, from checkouts of the user's: `python -m benchmarks.peers --help`
predicted.py        step times predicted by the cost model, after calibration here, beside measured ones
guide/              pages of docs/generated: what each strategy sends, typical workloads, a run tuned step by step
__main__.py         the command

Each benchmark is a module with `rows(quick)`; the first line of its docstring is the title of its table. A benchmark with
rows of another kind has a `print_table` of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from benchmarks.harness import DEVICES, _device, print_table
from minipar.runtime.devices import Machine, why_not_nccl
from minipar.support.errors import one_of

NAMES = tuple(
    name
    for name in (
        "collectives",
        "data_parallel",
        "compress",
        "zero",
        "tensor_parallel",
        "pipeline",
        "expert",
        "context",
        "mesh",
        "checkpoints",
        "training",
        "inference",
        "transformers_serving",
        "predicted",
    )
    if find_spec(f"benchmarks.{name}")
)


def run(names: Sequence[str] | None = None, quick: bool = False, device: str = "cpu") -> None:
    """Print the tables of the named benchmarks, or of all. Raises ValueError for an unknown name or a missing GPU."""
    for name in names or NAMES:
        if name not in NAMES:
            raise ValueError(f"names={name!r} is no benchmark; use {one_of(NAMES)}")
    if device not in DEVICES:
        raise ValueError(f"device={device!r} is unknown; use {one_of(DEVICES)}")
    if device == "cuda" and (why := why_not_nccl(1, Machine.here())):
        raise ValueError(f"device='cuda': NCCL {why}")
    before = _device.set(device)
    try:
        for name in names or NAMES:
            module = import_module(f"benchmarks.{name}")
            show = getattr(module, "print_table", print_table)
            title = (module.__doc__ or "").splitlines()[0]
            show(title, module.rows(quick))
    finally:
        _device.reset(before)
