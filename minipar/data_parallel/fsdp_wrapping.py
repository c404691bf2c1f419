"""From a module to FSDP's units: which modules they are, which parameters each has, and their shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel.arguments import CommOf, require_same_parameters
from minipar.data_parallel.flat_gradients import FlatGradients
from minipar.data_parallel.flat_parameters import FlatParameters
from minipar.data_parallel.fsdp_guards import require_shardable
from minipar.data_parallel.fsdp_unit import Unit
from minipar.data_parallel.memory import Memory
from minipar.data_parallel.reductions import ReduceOptions
from minipar.mesh import Placement, placement_of

Init = Callable[[str, tuple[int, ...]], Tensor]  # (canonical name, shape) -> the parameter's value
InitPart = Callable[[Placement], Tensor]  # Placement -> the value of the part that it describes
# A module class, a tuple or list of them, or a predicate; None: the whole module is one unit.
UnitChoice = (
    type[nn.Module] | tuple[type[nn.Module], ...] | list[type[nn.Module]] | Callable[[nn.Module], bool] | None
)


class Wrapping(NamedTuple):
    """The arguments of FSDP that say how parameters are sharded."""

    comm_of: CommOf
    replicas_of: Callable[[Tensor], Comm | None]
    shard_rest: bool
    compute_dtype: torch.dtype | None
    reduction: ReduceOptions
    memory: Memory
    init: Init | None
    init_part: InitPart | None
    axis: str


def make_units(
    module: nn.Module, choice: UnitChoice, how: Wrapping, options: Mapping[str, object]
) -> list[Unit]:
    """Shard the module's parameters; return its units, the root first. `options` are equal on all ranks."""
    units, root_is_unit = find_units(module, choice)
    require_shardable(module, [(unit.name, unit.module) for unit in units])
    owner = unit_of_parameter(units)
    named: dict[Tensor, str] = {p: f"{n} in unit {owner[p].name!r}" for n, p in module.named_parameters()}
    named |= {buffer: f"buffer {name}" for name, buffer in module.named_buffers()}
    for comm_of in (how.comm_of, how.replicas_of):
        shared = {x: comm for x in named if (comm := comm_of(x)) is not None}
        require_same_parameters(shared.__getitem__, [(named[x], x) for x in shared], options)
    groups: dict[FlatKey, list[nn.Parameter]] = {}
    for param, unit in owner.items():
        comm, replicas = how.comm_of(param), how.replicas_of(param)
        copies = () if replicas is None else (replicas,)
        key = FlatKey(unit, comm, copies, param.dtype, param.requires_grad)
        if unit is units[0] and not how.shard_rest and not root_is_unit:
            key = key._replace(comm=None, replicas=(comm, *copies))
        groups.setdefault(key, []).append(param)
    for key, params in groups.items():
        unit, reduction = key.unit, how.reduction
        flat = FlatParameters(
            params, unit.name, key.comm, key.replicas, how.compute_dtype, how.memory, reduction.algorithm
        )
        init_shards(flat, how.init, how.init_part, how.axis)
        unit.flats.append(flat)
        unit.gradients.append(FlatGradients(flat, reduction))
    return units


class FlatKey(NamedTuple):
    """The properties that the parameters of one flat buffer share. If comm is None, the parameters are not sharded."""

    unit: Unit
    comm: Comm | None
    replicas: tuple[Comm, ...]
    dtype: torch.dtype
    trained: bool


def find_units(module: nn.Module, choice: UnitChoice) -> tuple[list[Unit], bool]:
    """Return the root and every match of `choice`, outer modules first; and whether the root matches."""
    root = Unit("root", module)
    if choice is None:
        return [root], True

    def matches(m: nn.Module) -> bool:
        kinds = tuple(choice) if isinstance(choice, list) else choice
        return isinstance(m, kinds) if isinstance(kinds, type | tuple) else kinds(m)

    found = [Unit(name, m) for name, m in module.named_modules() if m is not module and matches(m)]
    if not found and not matches(module):
        raise ValueError(
            f"units={choice!r} matches no module inside {type(module).__name__}; "
            "use a module class, a tuple of them, a predicate, or None for all of it as one unit"
        )
    return [root, *found], matches(module)


def unit_of_parameter(units: Sequence[Unit]) -> dict[nn.Parameter, Unit]:
    """Map each parameter to its unit: the innermost unit that contains it.

    A parameter tied between units, or of a module that several units share, belongs to the innermost unit that contains all
    modules that use it, so that it is unsharded while any of them runs.
    """
    of_module = {unit.module: unit for unit in units}
    chains: dict[nn.Parameter, list[Unit]] = {}  # the units around all its uses, outer first
    paths = [(units[0].module, list[Unit]())]  # modules with the units around them, still to be visited
    while paths:
        module, around = paths.pop()
        around = [*around, of_module[module]] if module in of_module else around
        for param in module.parameters(recurse=False):
            chains[param] = [unit for unit in chains.get(param, around) if unit in around]
        paths += [(child, around) for child in module.children()]
    return {param: chain[-1] for param, chain in chains.items()}


def init_shards(flat: FlatParameters, init: Init | None, init_part: InitPart | None, axis: str) -> None:
    """Shard rank 0's parameters. For parameters on the meta device, shard values that `init` or `init_part` makes."""
    if not any(p.is_meta for p in flat.params):
        flat.cut(axis)
        return
    if init is None and init_part is None:
        name = next(flat.names[p] for p in flat.params if p.is_meta)
        raise ValueError(
            f"{name} is on the meta device and init is None; pass init=(canonical name, shape) -> value"
        )
    placements = {p: placement_of(p).flatten_range(*flat.part(p)) for p in flat.params}

    def part_of(param: nn.Parameter) -> Tensor:
        placement = placements[param]
        if init_part is not None:
            return init_part(placement)
        assert init is not None
        return placement.slice_of(init(placement.name, placement.global_shape))

    flat.cut(axis, part_of)
