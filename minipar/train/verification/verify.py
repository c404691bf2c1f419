"""`minipar verify`: compare any mesh with one process, tensor by tensor, and name the first tensor that diverges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from minipar.comm import Comm
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig
from minipar.mesh import Mesh, Placement, placement_of
from minipar.runtime.devices import Machine, choose_backend
from minipar.runtime.launch import run
from minipar.train.checkpoint.initial_weights import check_initial_weights, whole_model
from minipar.train.data.text import Text, load_data
from minipar.train.parallelize import parallelize
from minipar.train.reference import relative, train_in_one_process
from minipar.train.step import train_step
from minipar.train.verification.provenance import place_in_recipe
from minipar.train.verification.rounded_reference import (
    TOLERANCE,
    Held,
    Tensors,
    is_rounded,
    replay_steps,
    whole,
)

UPDATE_TOLERANCE = 1e-5  # for float32 arithmetic on the same inputs

T = TypeVar("T")
# Pairs: a tensor that has a placement, and the values to compare (None: nothing to compare).
Values = Iterable[tuple[torch.Tensor, torch.Tensor | None]]


class Row(NamedTuple):
    """One line of the table: the largest difference of `what` from one process, and the tensor and rank where it occurs.

    difference  max|a - b| / max|b|, or max|a - b| if b is zero
    place       how strategies made that rank's part of the tensor (`place_in_recipe`)
    """

    what: str
    tensors: int
    difference: float
    worst: str
    rank: int
    equal: bool
    place: str = ""


class Verification(NamedTuple):
    """The result of `verify`: a row for each comparison with one process, and whether all are equal."""

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


class Compared(NamedTuple):
    """A part of a tensor on a rank of the mesh, and the same part in one process."""

    rank: int
    placement: Placement
    got: torch.Tensor
    want: torch.Tensor


class Observed(NamedTuple, Generic[T]):
    """A rank's run, or one process's.

    snapshots  its parts of tensors, or tensors by name, at moments in the order of the run: "gradients, step 0"
    messages   for each step, what the reference of a lossy run has recorded
    """

    snapshots: dict[str, T]
    losses: list[float]
    norms: list[float]
    messages: list[list[Any]]


def verify(config: TrainConfig = VERIFY_DEFAULTS, backend: str = "auto") -> Verification:
    """Run `config.steps` steps on the configuration's mesh and in one process, and compare every tensor.

    Compares every rank's part of every tensor with the same part of the one-process tensor: the initial weights; in each
    step the gradients, the loss and the gradient norm; the weights at the end. So the first row that differs shows what
    went wrong first, and on which rank. For half precision, see `rounded_reference.py`; a run with lossy averages is
    compared by the reference that its `Averaging` has.
    The mesh runs on GPUs if `backend` is "nccl", or if it is "auto" and NCCL can serve this mesh; then the one process
    computes on a GPU, too, except for half precision, which is compared with the CPU.
    Raises ValueError for a text that is unreadable, too short or outside the vocabulary, RankError if a rank fails.
    """
    config.require_local_ranks()
    lossy = _lossy_reference(config)
    check_initial_weights(config)
    text, _ = load_data(config)
    backend = choose_backend(backend, config.world_size, Machine.here())
    seen = run(
        _observe_rank, config, text, world_size=config.world_size, backend=backend, timeout_s=config.timeout_s
    )
    if lossy is not None:
        return Verification(config, lossy.lossy_rows(config, text, seen))
    if is_rounded(config):
        return Verification(config, replayed_rows(config, text, seen))
    wanted, losses, norms, _ = run(_observe_one_process, config, text, world_size=1, backend=backend)[0]
    limit = TOLERANCE[config.dtype]
    rows = []
    for what, want in wanted.items():
        rows.append(tensor_row(config, what, [rank.snapshots[what] for rank in seen], want, limit))
        if what.startswith("gradients"):
            step = int(what.split()[-1])
            rows.append(number_row(f"loss, step {step}", [r.losses[step] for r in seen], losses[step], limit))
            of_norms = [r.norms[step] for r in seen]
            rows.append(number_row(f"gradient norm, step {step}", of_norms, norms[step], limit))
    return Verification(config, rows)


def _lossy_reference(config: TrainConfig) -> Any:
    """Return the module that compares the steps of a run whose averages are lossy; None if all its steps are exact."""
    averaging = config.choice("compress")
    exact = averaging.exact_steps(config)
    if exact >= config.steps:
        return None
    if not averaging.reference:
        raise ValueError(
            f"compress={config.compress} is lossy, and has no form in one process to be compared with after its first "
            f"{exact} steps; use {f'steps={exact}, or ' if exact else ''}another method"
        )
    return import_module(averaging.reference)


def _observe_rank(world: Comm, config: TrainConfig, text: Text) -> Observed[Held]:
    mesh = Mesh(world, **config.mesh_sizes)
    state = parallelize(config, mesh, world.device)
    seen: dict[str, Held] = {}
    losses, norms, messages = [], [], []
    lossy = _lossy_reference(config)
    recorded = [] if lossy is None else lossy.record_messages(state)
    each_step = is_rounded(config) or lossy is not None

    def keep(what: str, values: Callable[[], Values]) -> None:
        seen[what] = [(placement_of(x), v.to("cpu", copy=True)) for x, v in values() if v is not None]

    def weights() -> Values:
        return [(x, x.detach()) for x, _ in state.optimizer.tensors_and_states()]

    def gradients() -> Values:
        wide, scale = config.torch_master_dtype, state.loss_scale
        return [(x, x.grad if x.grad is None else x.grad.to(wide) / scale) for x in state.optimizer.tensors]

    keep("initial weights", weights)
    for step in range(config.steps):
        observe = partial(keep, f"gradients, step {step}", gradients)
        metrics = train_step(world, state, config, text, step, observe)
        if each_step:
            keep(f"weights, step {step}", weights)
        messages.append(list(recorded))
        recorded.clear()
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    if not each_step:
        keep("weights at the end", weights)
    return Observed(seen, losses, norms, messages)


def _observe_one_process(world: Comm, config: TrainConfig, text: Text) -> Observed[Tensors]:
    seen: dict[str, Tensors] = {}

    def observe(masters: Mapping[str, torch.Tensor]) -> None:
        if not seen:
            seen["initial weights"] = {n: p.detach().to("cpu", copy=True) for n, p in masters.items()}
        else:
            gradients = {n: p.grad.to("cpu", copy=True) for n, p in masters.items() if p.grad is not None}
            seen[f"gradients, step {len(seen) - 1}"] = gradients

    reference = train_in_one_process(config, text, config.steps, observe=observe, device=world.device)
    seen["weights at the end"] = dict(reference.parameters)
    return Observed(seen, reference.losses, reference.grad_norms, [])


def replayed_rows(
    config: TrainConfig,
    text: Text,
    seen: list[Observed[Held]],
    averaged: Callable[[int, list[Held]], tuple[list[Held], list[Row]]] = lambda step, gradients: (
        gradients,
        [],
    ),
) -> list[Row]:
    """Compare each step of a mesh with one process that starts from the mesh's own weights.

    averaged  (step, gradients of all ranks after they were averaged) -> what must be the gradients of one process, and rows
              about the averages
    """
    held = {what: [rank.snapshots[what] for rank in seen] for what in seen[0].snapshots}
    wholes = [*map(whole, held.values())]
    weights, gradients = [wholes[0], *wholes[2::2]], wholes[1::2]
    wanted = run(replay_steps, config, text, weights[:-1], gradients, world_size=1)[0]
    model = whole_model(config)
    initial = {name: p.detach().to(config.torch_master_dtype) for name, p in model.named_parameters()}
    rows = [tensor_row(config, "initial weights", held["initial weights"], initial, UPDATE_TOLERANCE)]
    for step, want in enumerate(wanted):
        of_losses, of_norms = [r.losses[step] for r in seen], [r.norms[step] for r in seen]
        rows.append(number_row(f"loss, step {step}", of_losses, want.loss, want.limits["loss"]))
        if math.isfinite(want.norm):
            what = f"gradients, step {step}"
            found, of_averages = averaged(step, held[what])
            rows.append(tensor_row(config, what, found, want.gradients, want.limits))
            rows += of_averages
            rows.append(number_row(f"gradient norm, step {step}", of_norms, want.norm, UPDATE_TOLERANCE))
        else:  # the step was skipped
            overflowed = [float(not math.isfinite(norm)) for norm in of_norms]
            in_one = not all(x.isfinite().all() for x in want.gradients.values())
            rows.append(number_row(f"overflow, step {step}", overflowed, float(in_one), 0))
        what = f"weights, step {step}"
        rows.append(tensor_row(config, what, held[what], want.weights, UPDATE_TOLERANCE))
    return rows


def tensor_row(
    config: TrainConfig, what: str, held_by_rank: list[Held], want: Tensors, limit: float | dict[str, float]
) -> Row:
    """Compare every rank's parts with those of one process's tensors. `limit` is one number, or one per tensor name."""
    parts = []
    for rank, held in enumerate(held_by_rank):
        for placement, got in held:
            whole = want[placement.tied_to or placement.name]
            parts.append(Compared(rank, placement, got, placement.slice_of(whole)))
    return parts_row(config, what, parts, limit, want)


def parts_row(
    config: TrainConfig,
    what: str,
    parts: list[Compared],
    limit: float | dict[str, float],
    whole: Tensors | None = None,
) -> Row:
    """Compare parts of tensors, relative to the largest entry of the `whole` tensor or, without it, of the part."""
    worst, where, equal = (-1.0, "", 0), None, True
    for rank, placement, got, want in parts:
        name = placement.tied_to or placement.name
        of = want if whole is None else whole[name]
        apart, largest = (x.abs().max().item() if x.numel() else 0.0 for x in (got - want, of))
        apart = relative(apart, largest)
        equal &= apart <= (limit[name] if isinstance(limit, dict) else limit)
        if (apart, name, rank) > worst:
            worst, where = (apart, name, rank), placement
    return Row(what, len(parts), *worst, equal, place_in_recipe(config, where, worst[2]) if where else "")


def number_row(what: str, by_rank: list[float], want: float, limit: float) -> Row:
    apart = [relative(abs(got - want), abs(want)) for got in by_rank]
    rank = max(range(len(apart)), key=apart.__getitem__)
    return Row(what, len(by_rank), apart[rank], what.split(",")[0], rank, apart[rank] <= limit)


def lines_of(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a table: one row per comparison."""
    yield f"{'':22}{'tensors':>8}  {'difference':>10}  where it is largest"
    for row in rows:
        mark = "" if row.equal else "   <-- DIVERGES"
        yield f"{row.what:22}{row.tensors:>8}  {row.difference:>10.1e}  {row.worst}, rank {row.rank}{mark}"


def diverges(mesh: str, first: Row) -> str:
    return f"{mesh} DIVERGES first in {first.what}: {first.worst} on rank {first.rank}"


def table(result: Verification) -> str:
    """Format the verification as text: one row per comparison, then the verdict."""
    mesh, first = result.config.mesh_name, result.first_divergence
    if first is None:
        verdict = f"{mesh}: the numbers of one process"
    else:
        verdict = diverges(mesh, first) + (f" ({first.place})" if first.place else "")
    return "\n".join([*lines_of(result.rows), verdict])
