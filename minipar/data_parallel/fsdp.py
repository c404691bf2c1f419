"""FSDP, or ZeRO-3: parameters, too, are cut; a unit of them is whole only while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from minipar.comm import Comm
from minipar.data_parallel import fsdp_full_state
from minipar.data_parallel.backward import Backward, in_backward
from minipar.data_parallel.flat_parameters import FlatParameters
from minipar.data_parallel.fsdp_unit import Unit, find_units, group_parameters, per_parameter
from minipar.data_parallel.offload import memory_for
from minipar.errors import one_of
from minipar.mesh import place_whole


class FSDP(Backward, nn.Module):
    """The module, each of p ranks keeping a p-th part of every parameter, of its gradient and so of optimizer state.

    module        changed in place; rank 0's parameters and buffers are everybody's. May be on the meta device: see `init`
    comm          the ranks to cut over, or a function from parameter to Comm
    units         a module class, a tuple of them or a predicate: each match is gathered and freed as one; None: all of it
    shard_rest    parameters outside units form a unit, the root. False: they stay whole, their gradients are averaged
    reshard_after_forward   free a unit after its forward, and gather it again for the backward. False: keep it
    compute_dtype floating point parameters are cast to it before they are gathered, and inputs of units too
    reduce_dtype  of the reduction; default: the parameters'
    reduce        "mean" or "sum" over the ranks, as in DDP
    prefetch      gather the next unit while this one computes
    replicas      ranks that have the same shard, as a Comm or a function: hybrid sharding
    init          (canonical name, shape) -> value, for a module on the meta device
    offload       "disk": shards live in files in `folder`

    forward       w = all_gather(shard)                              unit by unit, before it runs
    backward      w = all_gather(shard) again;  shard.grad = 1/p reduce_scatter(w.grad)

    Make the optimizer of `parameters()` after this: they are now flat shards, gradients too. Every rank must run the same
    units in the same order. The unit whose forward ends last is kept for the backward, which begins with it.

    Sends per step (p-1)/p of: every unit twice in compute_dtype (less the last one, once), trained ones in reduce_dtype,
    each parameter rounded up to 64 elements and each unit to 64p; and ring fashion one byte a parameter. 3P against DDP's
    2P elements. Holds shards and at most three gathered units: the root, the running one and the next.
    Raises ValueError for a bad argument; RuntimeError where a freed parameter is used or a storage has been replaced.
    Source: ZeRO, arXiv:1910.02054, section 5.3; PyTorch FSDP, arXiv:2304.11277, sections 3 and 4.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | Callable[[Tensor], Comm],
        units=None,
        shard_rest: bool = True,
        reshard_after_forward: bool = True,
        compute_dtype: torch.dtype | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        reduce: str = "mean",
        prefetch: bool = True,
        algorithm: str = "auto",
        replicas: Comm | Callable[[Tensor], Comm] | None = None,
        init: Callable[[str, tuple[int, ...]], Tensor] | None = None,
        offload: str | None = None,
        folder: str | None = None,
        axis: str = "dp",
    ):
        super().__init__()
        if reduce not in ("mean", "sum"):
            raise ValueError(f"reduce={reduce!r} is unknown; use {one_of(('mean', 'sum'))}")
        self.module, self.reduce, self.algorithm = module, reduce, algorithm
        self.reshard_after_forward, self.prefetch = reshard_after_forward, prefetch
        self.compute_dtype = compute_dtype
        place_whole(module)
        modules, root_is_unit = find_units(module, units)
        self.units = [Unit(name, m) for name, m in modules]
        self.root = self.units[0]
        make = partial(FlatParameters, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype,
                       memory=memory_for(offload, folder))  # fmt: skip
        comm_of, replicas_of = per_parameter(comm), per_parameter(replicas)
        rest_is_whole = not shard_rest and not root_is_unit
        for (i, cut_over, copies, *_), params in group_parameters(
            module, modules, comm_of, replicas_of, rest_is_whole
        ).items():
            flat = make(params, self.units[i].name, cut_over, copies)
            fsdp_full_state.fill(flat, init, axis)
            self.units[i].flats.append(flat)
        fsdp_full_state.share_buffers(module, comm_of, replicas_of)
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self._flat_of = {p: flat for flat in self.flats for p in flat.params}
        self._synchronised = True
        self._depth = 0
        self._forward_order = self._backward_order = ()
        self._used: set[nn.Parameter] = set()  # since the last reduction, on this rank
        self._lingering: Unit | None = None  # ran last, and is freed when another begins
        self._begin()
        self._hook()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _hook(self) -> None:
        for unit in self.units:
            unit.module.forward = partial(self._run, unit, unit.module.forward)
        for param, flat in self._flat_of.items():
            if flat.trained:
                param.register_post_accumulate_grad_hook(self._on_gradient)
                param.take_gradient = partial(self._take, param)  # for products that were put off

    # A forward --------------------------------------------------------------------------------------------------

    def _run(self, unit: Unit, forward, *args, **kwargs):
        """What a unit's module does when it is called."""
        args, kwargs = self._before_forward(unit, args, kwargs)
        try:
            outputs = forward(*args, **kwargs)
        except BaseException:
            if not in_backward():  # there, recomputation ends early by raising
                self._reset()
            raise
        self._after_forward(unit, outputs)
        return outputs

    def _before_forward(self, unit: Unit, args, kwargs):
        if not in_backward():
            if self._armed:
                self._abandon()
            if self._depth == 0:
                self._open()
            self._depth += 1
            if unit not in self._begun:
                self._begun.append(unit)
        self._bring(unit)
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(unit, args, kwargs)
        if self.compute_dtype is not None:
            args, kwargs = tree_map_only(Tensor, self._cast, (args, kwargs))
        return args, kwargs

    def _after_forward(self, unit: Unit, outputs) -> None:
        if torch.is_grad_enabled():
            watched = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
            if watched:
                register_multi_grad_hook(watched, lambda _: self._before_backward(unit), mode="any")
        if unit.active == 0:
            self._linger(unit)
        if not in_backward():
            self._ended = [*(u for u in self._ended if u is not unit), unit]
            self._depth -= 1
            if self._depth == 0:
                self._close()

    def _watch_inputs(self, unit: Unit, args, kwargs):
        """Call `_after_backward` when the gradients of all inputs are there: then the unit's parameters are done with."""
        # Views, so that this unit is freed before the one whose output this was brings its own and the next one's; and
        # because the gradient of a leaf is there as soon as it is computed, maybe before that of a parameter.
        args, kwargs = tree_map_only(Tensor, lambda x: x.view_as(x) if x.requires_grad else x, (args, kwargs))
        watched = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        if watched:
            register_multi_grad_hook(watched, lambda _: self._after_backward(unit), mode="all")
        return args, kwargs

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.compute_dtype) if x.is_floating_point() else x

    def _open(self) -> None:
        """The model begins to run. Nothing gathered earlier is trusted: an optimizer may have stepped since."""
        self._begun, self._ended = [], []
        self._lingering = None
        for flat in self.flats:
            flat.check()
            if self._synchronised or self.reshard_after_forward:
                flat.free(guarded=True)
            else:
                flat.show_shard(guarded=not flat.filled)

    def _close(self) -> None:
        """The model has run. Until its backward parameters are shards, though some may still be filled."""
        self._forward_order, self._backward_order = tuple(self._begun), tuple(reversed(self._ended))
        for unit in self.units:
            if torch.is_grad_enabled():
                unit.show_shard()
            else:
                unit.free()

    # Gathered and freed -----------------------------------------------------------------------------------------

    def _bring(self, unit: Unit) -> None:
        """Make the unit whole; free the one that ran before, and start to gather the one that comes next."""
        if self._lingering is not None and self._lingering is not unit:
            self._lingering.free(guarded=True)
        self._lingering = None
        unit.gather(self.algorithm)
        following = self._following(unit)
        if self.prefetch and following is not None:
            following.gather(self.algorithm)
        unit.show_full()

    def _following(self, unit: Unit) -> Unit | None:
        order = self._backward_order if in_backward() else self._forward_order
        if unit not in order:
            return None
        return next(iter(order[order.index(unit) + 1 :]), None)

    def _linger(self, unit: Unit) -> None:
        """Free a unit, but not before another begins: the last of a forward is the first of the backward."""
        if not self.reshard_after_forward and torch.is_grad_enabled():
            return
        if self._lingering is not None and self._lingering is not unit:
            self._lingering.free(guarded=True)
        self._lingering = unit

    # For the caller ---------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self):
        """Backwards inside only accumulate full gradients; the next one outside, or `synchronize`, reduces the sum.

        They also keep gathered what `reshard_after_forward=False` keeps: units are then gathered once, not per backward.
        """
        before, self._synchronised = self._synchronised, False
        try:
            yield
        finally:
            self._synchronised = before

    def synchronize(self) -> None:
        """Reduce what has been accumulated, now: for gradients that were not computed by a backward outside no_sync."""
        before, self._synchronised = self._synchronised, True
        self._begin()
        self._finish()
        self._synchronised = before

    def full_state_dict(self) -> dict[str, Tensor]:
        """The one-process model's state dict, on every rank, in the parameters' own dtype, on the CPU."""
        return fsdp_full_state.full_state_dict(self)

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's part of everything. ValueError names what is missing, unexpected or misshapen."""
        fsdp_full_state.load_full_state_dict(self, state)

    def summon_full_parameters(self, writeback: bool = True):
        """A context in which parameters are whole, in their own dtype; what is written to them there stays."""
        return fsdp_full_state.summon(self, writeback)
