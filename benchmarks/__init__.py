"""Times against torch's own implementations, as ratios: `python -m benchmarks [name ...]`, or `minipar bench`.

harness.py          time two implementations in turn in one run; print the table
collectives.py      collectives against gloo's
data_parallel.py    DDP steps against torch's
compress.py         cheap messages against torch's communication hooks
zero.py             ZeRO-1 and FSDP steps against torch's
tensor_parallel.py  tensor parallelism against DTensor
pipeline.py         pipelines against torch.distributed.pipelining, and against the simulator
expert.py           mixtures of experts against loops, torch's all-to-all and a dense model
context.py          ring attention against an all-gather and fused attention
mesh.py             two mesh axes at once against torch's, and the cost of checkpoints
__main__.py         the command

Each benchmark is a module with `rows(quick)`; the first line of its docstring is the title of its table.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from benchmarks.harness import print_table
from minipar.errors import one_of

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
    )
    if find_spec(f"benchmarks.{name}")
)


def run(names=None, quick: bool = False) -> None:
    """Print the tables of the named benchmarks, or of all. Raises ValueError for an unknown name."""
    for name in names or NAMES:
        if name not in NAMES:
            raise ValueError(f"names={name!r} is no benchmark; use {one_of(NAMES)}")
    for name in names or NAMES:
        module = import_module(f"benchmarks.{name}")
        print_table(module.__doc__.splitlines()[0], module.rows(quick))
