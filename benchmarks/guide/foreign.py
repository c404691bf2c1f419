"""Write the page of foreign code, docs/generated/foreign_code.md: what adapters of torch's and others' code meet.

A row of foreign.toml names an adapter in docs/adapters, which is judged stage by stage. Then DDP is trained beside one
process, where its mean over ranks is not the mean over samples.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minipar.comm import Comm
from minipar.runtime.launch import run
from minipar.spec import CONVENTIONS, SPECIFICATIONS, Report, check
from minipar.spec.counted import TORCHS, counts_as

TORCH = torch.__version__.partition("+")[0]
FOLDER = Path(__file__).parents[2] / "docs" / "adapters"
OPTIONAL = {"transformers_tp": "transformers"}  # an adapter, and the package that it needs


class Adapter(NamedTuple):
    """Foreign code in the shape of a specification. differs: why it does not meet a stage."""

    code: str
    specification: str
    file: str
    differs: str = ""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.file}.py"

    def reports(self) -> list[Report]:
        """Judge each stage for itself, also those after one that is not met."""
        stages = SPECIFICATIONS[self.specification].stages
        return [check(self.specification, str(self.path), [stage.name]) for stage in stages]


def adapters(installed: bool = True) -> list[Adapter]:
    """Return all adapters, or those whose packages are installed."""
    table = tomllib.loads((files(__package__) / "foreign.toml").read_text())["adapter"]
    found = [Adapter(**row) for row in table]
    return [one for one in found if not installed or find_spec(OPTIONAL.get(one.file, "torch"))]


def row(adapter: Adapter) -> tuple[str, str]:
    """Return the adapter's row of the table, and what is said of a stage that it does not meet."""
    reports = adapter.reports()
    verdicts = [report.verdicts[0] for report in reports]
    met = ", ".join(f"**{v.stage}: no**" if v.words else v.stage for v in verdicts)
    sent = next((v.sent for v in verdicts if v.sent and v.stage in ("bytes", "drawn")), {})
    sends = ", ".join(f"{counts_as(kind).removeprefix(TORCHS)} {n:,}" for kind, n in sent.items())
    link = f"[{adapter.file}.py](../adapters/{adapter.file}.py)"
    by = ", ".join(reports[0].conventions)
    wrong = "".join(f"`{v.stage}`: {_without_numbers(v.words)}. " for v in verdicts if v.words)
    said = f"- {adapter.code}, {wrong}{adapter.differs}" if wrong else ""
    return f"| {adapter.code} | {adapter.specification} | {link} | {met} | {sends} | {by} |", said


def _without_numbers(words: str) -> str:
    """Leave out the first wrong entry, whose last digits are the machine's."""
    what, wrong, _ = words.partition(" is wrong in ")
    return f"{what} is wrong" if wrong else words


# DDP beside one process ---------------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor, int, int], Tensor]  # (outputs, targets, samples of all ranks, ranks)


class Case(NamedTuple):
    """What is trained: the samples of each rank, a module, its loss, and what the case shows.

    equal  whether its gradients are one process's
    join   options of DDP's join(), for a rank without samples; None: without it
    """

    what: str
    samples: tuple[int, int]
    why: str
    equal: bool
    module: Callable[[], nn.Module] = lambda: nn.Linear(4, 3)
    loss: Loss = lambda y, target, total, ranks: (y - target).square().mean()
    join: Mapping[str, bool] | None = None


def _normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def _own_share(y: Tensor, target: Tensor, total: int, ranks: int) -> Tensor:
    return (y - target).square().sum() * ranks / (total * target.shape[1])


CASES = [
    Case("as many samples on each rank", (4, 4), "a mean of equal means is the mean", True),
    Case(
        "1 sample and 5",
        (1, 5),
        "a mean of means: the one sample counts as much as the five together",
        False,
    ),
    Case(
        "1 sample and 5, each rank's sum divided by all 6, times 2 ranks",
        (1, 5),
        "the division by the number of ranks is undone",
        True,
        loss=_own_share,
    ),
    Case(
        "BatchNorm, as many samples on each rank",
        (4, 4),
        "each rank takes mean and variance of its own samples; SyncBatchNorm, on GPUs, takes them over all ranks",
        False,
        module=_normalized,
    ),
    Case(
        "a batch on rank 0 alone, under `join()`",
        (4, 0),
        "rank 1 adds zeros, and the sum is still divided by 2",
        False,
        join={},
    ),
    Case(
        "the same, with `divide_by_initial_world_size=False`",
        (4, 0),
        "the sum is divided by the ranks that have a batch",
        True,
        join={"divide_by_initial_world_size": False},
    ),
]


def gap(case: Case) -> float:
    """Return the largest difference of DDP's gradients from one process's, relative to the largest gradient."""
    gaps: list[float] = run(_gap, case, world_size=2)
    return gaps[0]


def _gap(world: Comm, case: Case) -> float:
    torch.manual_seed(0)
    one = case.module().double()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(case.module().double(), process_group=world.process_group())
    xs, targets = torch.randn(sum(case.samples), 4).double(), torch.randn(sum(case.samples), 3).double()
    total, r = sum(case.samples), world.rank
    case.loss(one(xs), targets, total, 1).backward()
    x, target = xs.split(case.samples)[r], targets.split(case.samples)[r]
    if case.join is not None:
        with ddp.join(**case.join):
            if len(x):
                case.loss(ddp(x), target, total, world.size).backward()
    else:
        case.loss(ddp(x), target, total, world.size).backward()
    wanted = [p.grad for p in one.parameters() if p.grad is not None]
    found = [p.grad for p in ddp.parameters() if p.grad is not None]
    largest = max(g.abs().max().item() for g in wanted)
    return (
        max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)) / largest
        if found
        else 0.0
    )


def in_words(gap: float) -> str:
    return f"{gap:.0%}" if gap > 1e-9 else "0"


def page() -> str:
    """Return the page."""
    rows, said = zip(*map(row, adapters()))
    conventions = "\n".join(f"- *{name}*: {words}" for name, words in CONVENTIONS.items())
    gaps = "\n".join(f"| {case.what} | {in_words(gap(case))} | {case.why} |" for case in CASES)
    return f"""# Foreign code, judged

<!-- Written by: python -m benchmarks.guide docs/generated -->

The specifications judge anybody's code. Here they judge torch {TORCH} on gloo, transformers' tensor parallelism,
and a Megatron-style f and g, each through an adapter of about ten lines:

```
minipar spec reduce_scatter docs/adapters/collectives.py
```

Bytes are those that rank 0 sends in the last case of the stage, by operation. torch.distributed's operations are seen
where they reach torch's dispatcher, forward and backward, those of DDP's reducer, FSDP and DTensor too. What gloo or NCCL
then does is not seen: a collective counts as a ring, a tree or its parts (`minipar/spec/counted.py`).

| code | specification | adapter | stages | bytes of rank 0 | by convention |
|---|---|---|---|---|---|
{chr(10).join(rows)}

## Stages that are not met, and why

{chr(10).join(filter(None, said))}

## Conventions

An adapter states them, and they are not held against it. The report says them.

{conventions}

## DDP beside one process

The largest difference of DDP's gradients, on two ranks, from those of one process that trains on the samples of both,
relative to the largest gradient; after one backward, in float64.

| samples | difference | why |
|---|---|---|
{gaps}
"""
