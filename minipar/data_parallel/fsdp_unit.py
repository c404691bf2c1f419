"""FSDP's units, modules whose parameters are unsharded together: which parameters a unit has, and the order of units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel.flat_gradients import FlatGradients
from minipar.data_parallel.flat_parameters import FlatParameters
from minipar.data_parallel.fsdp_guards import NamedModule
from minipar.data_parallel.unused_parameters import used_on_any_rank


class Unit:
    """The flat parameters of one module, except those that belong to units inside it, and their gradients.

    trained           whether the module, units inside it included, has parameters that are not frozen
    active            the number of calls of the module that are in their backward
    output_is_hidden  True if the unit has a backward, but no tensor found in its last output requires a gradient; the unit
                      then stays unsharded
    """

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module = name, module
        self.trained = any(param.requires_grad for param in module.parameters())
        self.flats: list[FlatParameters] = []
        self.gradients: list[FlatGradients] = []
        self.active = 0
        self.output_is_hidden = False

    def unshard(self) -> None:
        for flat in self.flats:
            flat.unshard()

    def use_unsharded(self) -> None:
        for flat in self.flats:
            flat.use_unsharded()

    def use_sharded(self, forbid: bool = False) -> None:
        for flat in self.flats:
            flat.use_sharded(forbid)

    def reshard(self, forbid: bool = False) -> None:
        for flat in self.flats:
            flat.reshard(forbid)


class UnitOrder:
    """The order of units, recorded in the last forward. It decides which unit to prefetch, and which to reshard later.

    reshard_after_forward, prefetch   as in FSDP
    pending_reshard                   the unit that ran last: resharded when another unit begins
    """

    def __init__(self, reshard_after_forward: bool, prefetch: bool):
        self.reshard_after_forward, self.prefetch = reshard_after_forward, prefetch
        self.forward_order: tuple[Unit, ...] = ()
        self.backward_order: tuple[Unit, ...] = ()
        self.pending_reshard: Unit | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a forward of the whole module."""
        self._begun: list[Unit] = []
        self._ended: list[Unit] = []
        self.pending_reshard = None

    def begin_unit(self, unit: Unit) -> None:
        if unit not in self._begun:
            self._begun.append(unit)

    def end_unit(self, unit: Unit) -> None:
        self._ended = [*(u for u in self._ended if u is not unit), unit]

    def end(self) -> None:
        """End the forward: the backward will run the units in the reverse of the order in which their forwards ended."""
        self.forward_order, self.backward_order = tuple(self._begun), tuple(reversed(self._ended))

    def unshard(self, unit: Unit, backward: bool) -> None:
        """Reshard the unit whose resharding was delayed, unshard this unit, and prefetch the next."""
        if self.pending_reshard is not None and self.pending_reshard is not unit:
            self.pending_reshard.reshard(forbid=True)
        self.pending_reshard = None
        unit.unshard()
        order = self.backward_order if backward else self.forward_order
        following = self._following(unit, order)
        if self.prefetch and following is not None:
            following.unshard()
            after = self._following(following, order)
            for flat in () if after is None else after.flats:
                flat.memory.advise_read(flat.own)
        unit.use_unsharded()

    def delay_reshard(self, unit: Unit) -> None:
        """Delay the unit's resharding until another unit runs, since the forward's last unit is the backward's first."""
        if self.pending_reshard is not None and self.pending_reshard is not unit:
            self.pending_reshard.reshard(forbid=True)
        self.pending_reshard = unit

    def _following(self, unit: Unit, order: tuple[Unit, ...]) -> Unit | None:
        if unit not in order:
            return None
        return next(iter(order[order.index(unit) + 1 :]), None)


class UnitReducer:
    """The gradient reduction of all units: each unit after its own backward, the rest at the end of the whole backward.

    units         FSDP's units, outer ones first
    gradients_of  parameter -> the FlatGradients it belongs to
    used          parameters with a gradient on this rank since the last reduction
    accumulates   whether a backward under no_sync has ended since then
    """

    def __init__(self, units: Sequence[Unit], algorithm: str):
        self.units, self.algorithm = units, algorithm
        self.gradients = [gradients for unit in units for gradients in unit.gradients]
        self.gradients_of = {p: gradients for gradients in self.gradients for p in gradients.flat.params}
        self.used: set[nn.Parameter] = set()
        self.accumulates = False
        self.begin()

    def begin(self) -> None:
        self._reduced_units: list[Unit] = []

    def collect_grad(self, param: nn.Parameter, gradient: Tensor) -> None:
        self.used.add(param)
        self.gradients_of[param].add(param, gradient)

    def reduce(self, unit: Unit) -> None:
        """Wait for the previous unit's reduce-scatter, then start this unit's, so at most two units hold full gradients."""
        for gradients in self._reduced_units[-1].gradients if self._reduced_units else ():
            gradients.advance()
        for gradients in unit.gradients:
            gradients.reduce()
        self._reduced_units.append(unit)

    def finish(self) -> None:
        """Reduce the remaining gradients, wait for all reductions, and write the shards' `.grad`."""
        for unit in reversed(self.units):
            if unit not in self._reduced_units or any(gradients.pending for gradients in unit.gradients):
                self.reduce(unit)
        used = self._used_anywhere()
        for gradients in self.gradients:
            gradients.finish()
            gradients.write(used)
        self.used.clear()
        self.accumulates = False

    def _used_anywhere(self) -> set[nn.Parameter]:
        """Return the parameters that any rank used, asking the ranks that shard them, then the ranks with replicas."""
        used = self.used
        comms: dict[nn.Parameter, tuple[Comm, ...]] = {}
        for param, gradients in self.gradients_of.items():
            comms[param] = gradients.flat.comms if gradients.flat.trained else ()
        for i in range(max(map(len, comms.values()), default=0)):
            comm_of = {p: c[i] for p, c in comms.items() if len(c) > i}
            used = used_on_any_rank(comm_of, used, self.algorithm) | (used - comm_of.keys())
        return set(used)

    def drop_pending(self) -> None:
        """Drop the gradients of backwards whose reduction has not begun."""
        for gradients in self.gradients:
            gradients.pending.clear()
        self.used.clear()
        self.accumulates = False

    def discard(self) -> None:
        """After an error, drop all gradients that have not been written to the shards."""
        for gradients in self.gradients:
            gradients.discard()
        self.used.clear()


# A module class, a tuple or list of them, or a predicate; None: the whole module is one unit.
UnitChoice = (
    type[nn.Module] | tuple[type[nn.Module], ...] | list[type[nn.Module]] | Callable[[nn.Module], bool] | None
)


def find_units(module: nn.Module, units: UnitChoice) -> tuple[list[NamedModule], bool]:
    """Return (name, module) of the root and every match of `units`, outer modules first; and whether the root matches."""
    if units is None:
        return [("root", module)], True

    def matches(m: nn.Module) -> bool:
        kinds = tuple(units) if isinstance(units, list) else units
        return isinstance(m, kinds) if isinstance(kinds, type | tuple) else kinds(m)

    found = [(name, m) for name, m in module.named_modules() if m is not module and matches(m)]
    if not found and not matches(module):
        raise ValueError(
            f"units={units!r} matches no module inside {type(module).__name__}; "
            "use a module class, a tuple of them, a predicate, or None for all of it as one unit"
        )
    return [("root", module), *found], matches(module)


def unit_of_parameter(modules: Sequence[NamedModule]) -> dict[nn.Parameter, int]:
    """Map each parameter to the index of its unit: the innermost unit that contains it.

    A parameter tied between units, or of a module that several units share, belongs to the innermost unit that contains all
    modules that use it, so that it is unsharded while any of them runs.
    """
    index = {module: i for i, (_, module) in enumerate(modules)}
    chains: dict[nn.Parameter, list[int]] = {}  # the units around all its uses, outer first
    paths = [(modules[0][1], list[int]())]  # modules with the units around them, still to be visited
    while paths:
        module, around = paths.pop()
        around = [*around, index[module]] if module in index else around
        for param in module.parameters(recurse=False):
            chains[param] = [i for i in chains.get(param, around) if i in around]
        paths += [(child, around) for child in module.children()]
    return {param: chain[-1] for param, chain in chains.items()}


class FlatKey(NamedTuple):
    """The properties that the parameters of one flat buffer share. If comm is None, the parameters are not sharded."""

    unit: int
    comm: Comm | None
    replicas: tuple[Comm, ...]
    dtype: torch.dtype
    trained: bool


def group_parameters(
    owner: Mapping[nn.Parameter, int],
    comm_of: Callable[[Tensor], Comm],
    replicas_of: Callable[[Tensor], Comm | None],
    rest_is_replicated: bool,
) -> dict[FlatKey, list[nn.Parameter]]:
    """Group the parameters that can share a flat buffer. `owner` is what `unit_of_parameter` returns."""
    groups: dict[FlatKey, list[nn.Parameter]] = {}
    for param in owner:
        comm, replicas = comm_of(param), replicas_of(param)
        copies = () if replicas is None else (replicas,)
        key = FlatKey(owner[param], comm, copies, param.dtype, param.requires_grad)
        if rest_is_replicated and key.unit == 0:
            key = key._replace(comm=None, replicas=(comm, *copies))
        groups.setdefault(key, []).append(param)
    return groups
