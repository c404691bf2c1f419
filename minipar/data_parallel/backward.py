"""The backward of FSDP: units gathered again in reverse, their gradients reduced and cut while the next one computes.

before a unit      whole again, and the next one on its way            its outputs have a gradient
a gradient         waits for the others of its unit
after a unit       reduce-scatter, and freed                           all its inputs have theirs
at the end         what is left is reduced; shards get their gradients
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from minipar.data_parallel.fsdp_unit import Unit
from minipar.data_parallel.unused_parameters import used_anywhere


class Backward:
    """The half of FSDP that autograd calls. See fsdp.py for what it stands on."""

    def _begin(self) -> None:
        self._armed = False
        self._reduced: list[Unit] = []
        self._reducing: Unit | None = None
        for unit in self.units:
            unit.active = 0

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            Variable._execution_engine.queue_callback(self._finish)
            for unit in self.units:
                unit.show_shard(guarded=True)

    def _before_backward(self, unit: Unit) -> None:
        self._arm()
        unit.active += 1
        self._bring(unit)

    def _after_backward(self, unit: Unit) -> None:
        unit.active -= 1
        if unit.active > 0:
            return
        unit.active = 0
        if self._synchronised or self.reshard_after_forward:
            unit.free(guarded=True)
        if self._synchronised:
            self._reduce(unit)

    def _on_gradient(self, param: nn.Parameter) -> None:
        gradient, param.grad = param.grad, None
        self._take(param, gradient)

    def _take(self, param: nn.Parameter, gradient: Tensor) -> None:
        self._used.add(param)
        self._flat_of[param].take(param, gradient)

    def _reduce(self, unit: Unit) -> None:
        if self._reducing is not None:
            self._reducing.settle(
                self.reduce, self.algorithm
            )  # no more than two units' full gradients are alive
        unit.reduce(self.reduce, self.algorithm)
        self._reducing = unit
        self._reduced.append(unit)

    def _finish(self) -> None:
        """The backward is over: reduce what is left, free everything, and give the shards their gradients."""
        if not self._synchronised:
            for unit in self.units:
                unit.free() if self.reshard_after_forward else unit.show_shard()
            self._begin()
            return
        for unit in reversed(self.units):
            unit.free()
            if unit not in self._reduced or any(flat.arrived for flat in unit.flats):
                self._reduce(unit)
        used = self._used_anywhere()
        for flat in self.flats:
            while flat.settle(self.reduce, self.algorithm):
                pass
            flat.deliver(used)
        self._used.clear()
        self._lingering = None
        self._begin()

    def _used_anywhere(self) -> set[nn.Parameter]:
        """By any rank of the Comm a parameter is cut over, then of those over which its chunk is copied."""
        used = self._used
        comms = {
            p: [c for c in (flat.comm, *flat.copies) if c is not None] for p, flat in self._flat_of.items()
        }
        for i in range(max(map(len, comms.values()), default=0)):
            comm_of = {p: c[i] for p, c in comms.items() if len(c) > i and self._flat_of[p].trained}
            used = used_anywhere(comm_of, used, self.algorithm) | (used - comm_of.keys())
        return set(used)

    def _reset(self) -> None:
        """After an exception: everything freed, nothing half done."""
        self._depth, self._lingering = 0, None
        for unit in self.units:
            unit.free()
        self._begin()

    def _abandon(self) -> None:
        """An exception ended the last backward before its end: what it had computed is dropped."""
        for flat in self.flats:
            flat.forget()
        self._reset()
        self._used.clear()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
