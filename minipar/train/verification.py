"""`minipar verify`: compare any mesh with one process, tensor by tensor, and name the first tensor that diverges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from minipar.errors import divisors
from minipar.mesh import Mesh, Placement, placement_of
from minipar.pipeline import SCHEDULES
from minipar.runtime.launch import run
from minipar.train.parallelize import parallelize
from minipar.train.provenance import place_in_recipe
from minipar.train.reference import train_in_one_process
from minipar.train.step import train_step
from minipar.train.text import load_text, require_samples
from minipar.train.train_config import VERIFY_DEFAULTS, TrainConfig

TOLERANCE = {"float64": 1e-9, "float32": 2e-3, "bfloat16": 0.2}  # relative to a tensor's largest entry
FLOOR = 1e-12  # a tensor with no larger entry is zero up to float64 rounding: its difference is absolute


class Row(NamedTuple):
    """One line of the table: the largest difference of `what` from one process, and the tensor and rank that have it.

    difference  max|a - b| / max|b|, or max|a - b| where b is zero
    place       the steps of the recipe that made that rank's part of the tensor
    """

    what: str
    tensors: int
    difference: float
    worst: str
    rank: int
    equal: bool
    place: str = ""


class Verification(NamedTuple):
    config: TrainConfig
    rows: list[Row]

    @property
    def equal(self) -> bool:
        return all(row.equal for row in self.rows)

    @property
    def first_divergence(self) -> Row | None:
        return next((row for row in self.rows if not row.equal), None)

    @property
    def difference(self) -> float:
        return max(row.difference for row in self.rows)


class Snapshot(NamedTuple):
    """Tensors at one moment: a rank's parts, or one process's tensors by name. `step` is None for weights."""

    what: str
    step: int | None
    tensors: list[tuple[Placement, torch.Tensor]] | dict[str, torch.Tensor]


class Observed(NamedTuple):
    """One rank's snapshots (initial weights, gradients of each step, last weights), and its losses and gradient norms."""

    snapshots: list[Snapshot]
    losses: list[float]
    norms: list[float]


def verify(config: TrainConfig = VERIFY_DEFAULTS) -> Verification:
    """Run `config.steps` steps on the configuration's mesh and in one process, and compare everything.

    Every rank's part of every tensor is compared with the same part of the one-process tensor: initial weights; then in
    each step the gradients, the loss and the gradient norm; then the weights at the end. The first row that differs
    therefore shows what went wrong first, and on which rank.
    Raises ValueError for a text that is unreadable or too short, RankError where a rank fails.
    """
    text = load_text(config.text)
    require_samples(text, config.seq_len, config.text)
    seen = run(_observe_rank, config, text, world_size=config.world_size, timeout_s=config.timeout_s)
    wanted, losses, norms = run(_observe_one_process, config, text, world_size=1)[0]
    limit = TOLERANCE[config.dtype]
    rows = []
    for i, (what, step, want) in enumerate(wanted):
        rows.append(_tensor_row(config, what, [rank.snapshots[i].tensors for rank in seen], want, limit))
        if step is not None:
            of_losses, of_norms = ([getattr(r, name)[step] for r in seen] for name in ("losses", "norms"))
            rows.append(_number_row(f"loss, step {step}", of_losses, losses[step], limit))
            rows.append(_number_row(f"gradient norm, step {step}", of_norms, norms[step], limit))
    return Verification(config, rows)


def _observe_rank(world, config: TrainConfig, text: torch.Tensor) -> Observed:
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    seen, losses, norms = [], [], []

    def keep(what: str, step: int | None, values) -> None:
        held = [(placement_of(x), v.to("cpu", copy=True)) for x, v in values() if v is not None]
        seen.append(Snapshot(what, step, held))

    weights = lambda: [(x, x.detach()) for x in state.optimizer.tensors]  # noqa: E731
    gradients = lambda: [(x, x.grad) for x in state.optimizer.tensors]  # noqa: E731
    keep("initial weights", None, weights)
    for step in range(config.steps):
        observe = partial(keep, f"gradients, step {step}", step, gradients)
        metrics = train_step(world, state, config, text, step, observe)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    keep("weights at the end", None, weights)
    return Observed(seen, losses, norms)


def _observe_one_process(world, config: TrainConfig, text: torch.Tensor) -> Observed:
    seen: list[Snapshot] = []

    def observe(model) -> None:
        if not seen:
            weights = {n: p.detach().clone() for n, p in model.named_parameters()}
            seen.append(Snapshot("initial weights", None, weights))
        else:
            step = len(seen) - 1
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
            seen.append(Snapshot(f"gradients, step {step}", step, gradients))

    reference = train_in_one_process(config, text, config.steps, observe=observe)
    seen.append(Snapshot("weights at the end", None, reference.parameters))
    return Observed(seen, reference.losses, reference.grad_norms)


def _tensor_row(config, what: str, held_by_rank, want: dict[str, torch.Tensor], limit: float) -> Row:
    """Compare every rank's parts with the same parts of one process's tensors."""
    worst, count, where = (-1.0, "", 0), 0, None
    for rank, held in enumerate(held_by_rank):
        for placement, got in held:
            name = placement.tied_to or placement.name
            whole = want[name]
            part = placement.slice_of(whole)
            apart = (got - part).abs().max().item() if got.numel() else 0.0
            largest = whole.abs().max().item()
            apart = _known(apart / largest if largest > FLOOR else apart)
            if (apart, name, rank) > worst:
                worst, where = (apart, name, rank), placement
            count += 1
    return Row(
        what, count, *worst, worst[0] <= limit, place_in_recipe(config, where, worst[2]) if where else ""
    )


def _number_row(what: str, by_rank: list[float], want: float, limit: float) -> Row:
    apart = [_known(abs(got - want) / max(abs(want), FLOOR)) for got in by_rank]
    rank = max(range(len(apart)), key=apart.__getitem__)
    return Row(what, len(by_rank), apart[rank], what.split(",")[0], rank, apart[rank] <= limit)


def _known(difference: float) -> float:
    """The difference, or inf if it is nan: nan differs infinitely from everything, nan included."""
    return math.inf if math.isnan(difference) else difference


def table(result: Verification) -> str:
    """Format the verification as text: one row per comparison, then the verdict."""
    head = f"{'':22}{'tensors':>8}  {'difference':>10}  where it is largest"
    lines = [head]
    for row in result.rows:
        mark = "" if row.equal else "   <-- DIVERGES"
        lines.append(
            f"{row.what:22}{row.tensors:>8}  {row.difference:>10.1e}  {row.worst}, rank {row.rank}{mark}"
        )
    if (first := result.first_divergence) is None:
        lines.append(f"{result.config.mesh_name}: the numbers of one process")
    else:
        lines.append(
            f"{result.config.mesh_name} DIVERGES first in {first.what}: {first.worst} on rank {first.rank}"
            + (f" ({first.place})" if first.place else "")
        )
    return "\n".join(lines)


def legal_configs(base: TrainConfig, world_size: int) -> Iterator[TrainConfig]:
    """Yield every legal mesh of `world_size` ranks with every ZeRO stage and, where pp > 1, every schedule."""
    from dataclasses import replace

    for pp, dp, cp in product(divisors(world_size), repeat=3):
        if world_size % (pp * dp * cp):
            continue
        tp = world_size // (pp * dp * cp)
        experts = divisors(dp * cp) if base.model.num_experts else [1]
        schedules = SCHEDULES if pp > 1 else ["1f1b"]
        for ep, zero, schedule in product(experts, range(4), schedules):
            sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, zero=zero, schedule=schedule)
            try:
                yield replace(base, microbatches=2 if pp > 1 else 1, **sizes)
            except ValueError:
                continue  # not legal for this model or batch
