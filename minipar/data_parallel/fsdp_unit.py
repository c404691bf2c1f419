"""FSDP's units, modules whose parameters are unsharded together: their order, and when each is reduced."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel.backward_end import Synchronised
from minipar.data_parallel.flat_gradients import FlatGradients
from minipar.data_parallel.flat_parameters import FlatParameters
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
        self.delay_reshard(unit)
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


class UnitReducer(Synchronised):
    """The gradient reduction of all units: each unit after its own backward, the rest at the end of the whole backward.

    units         FSDP's units, outer ones first
    gradients_of  parameter -> the FlatGradients it belongs to
    used          parameters with a gradient on this rank since the last reduction
    accumulates   whether a backward under no_sync has ended that gave one
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

    def discard(self) -> None:
        """Drop all gradients that have not been written to the shards."""
        for gradients in self.gradients:
            gradients.discard()
        self.used.clear()
        self.accumulates = False
