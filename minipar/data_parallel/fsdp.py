"""FSDP, or ZeRO-3: parameters are sharded too, and each unit's are unsharded only while the unit runs.

`simple/fsdp.py`, plus units inside units, prefetch, unused, frozen and tied parameters, hybrid sharding, mixed
precision, no_sync, recomputation, buffers that change, and recovery from exceptions.
"""

from __future__ import annotations

# longer than 250 lines because the hooks of a unit's forward and of its backward are read together
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from minipar.comm import Comm
from minipar.data_parallel import arguments
from minipar.data_parallel import fsdp_full_state as full_state
from minipar.data_parallel.buffers import copy_buffers_of_rank0
from minipar.data_parallel.flat_gradients import FlatGradients, UnitReducer
from minipar.data_parallel.flat_parameters import FlatParameters, State
from minipar.data_parallel.fsdp_unit import (
    Unit,
    UnitOrder,
    find_units,
    group_parameters,
    refuse_compile,
)
from minipar.data_parallel.gradient_reducer import BackwardEnd, in_backward, take_over, tensors_in
from minipar.data_parallel.offload import memory_for
from minipar.mesh import Placement, place_whole
from minipar.model.overrides import GRADIENT_RECEIVER


class FSDP(nn.Module):
    """A wrapped module that is sharded: each of p ranks holds 1/p of its parameters, gradients and optimizer state.

    module        changed in place; every rank gets rank 0's parameters and buffers. May be on the meta device: see `init`
    comm          the ranks to shard over, or a function from parameter to Comm
    units         a module class, a tuple of them or a predicate: each match is a unit. None: the whole module is one
    shard_rest    parameters outside units form a unit, the root. False: they are replicated, their gradients all-reduced
    reshard_after_forward   reshard a unit after its forward, unshard it again for the backward. False: keep it unsharded
    compute_dtype sharded parameters are cast to it before the all-gather; so are floating point inputs of units
    reduce_dtype  of the gradient reduction; default: the parameters'
    reduce        "mean" or "sum" over the ranks, as in DDP
    prefetch      all-gather the next unit while this one computes
    replicas      the ranks that hold the same shard, as a Comm or a function: hybrid sharding
    init          (canonical name, shape) -> value, for a module on the meta device; or init_part, Placement -> the
                  value of that part, where it need not be made whole
    offload       None, "cpu" or "disk": the memory that holds the shards; `folder` for the files
    broadcast_buffers   make the buffers (running means, say) rank 0's before each forward

    forward       w = all_gather(shard)                              unit by unit, before the unit runs
    backward      w = all_gather(shard) again;  shard.grad = 1/p reduce_scatter(w.grad)

    Wrap first, then make the optimizer from `parameters()`: these are now flat shards, and so are their gradients. It must
    update each element from that element alone (see elementwise_optimizers.py). Clip with `minipar.clip_grad_norm_`:
    torch's would take the norm of a shard for the whole, and is refused. All ranks must run the same units in the same
    order. The unit whose forward ends last stays unsharded for its backward, which comes first. torch.compile cannot trace
    the hooks: what it returns may be a unit, FSDP(torch.compile(module), comm), or be inside one, but not around one.

    Sends per step (p-1)/p of each unit: twice in compute_dtype to all-gather it (the unit whose forward ends last, once),
    once in reduce_dtype to reduce-scatter its gradients if it is trained. Each parameter is rounded up to 64 elements and
    each unit to 64p. Also sends an all-reduce of one byte per parameter. In all 3P elements, where DDP sends 2P. A forward
    with gradients and outside `no_sync` broadcasts the buffers: all ranks together send their bytes p-1 times.
    Holds the shards and at most three unsharded units: the root, the running one and the next.
    Raises ValueError for a bad argument; RuntimeError where a resharded parameter is used, a storage was replaced, a frozen
    parameter was thawed, a gradient is sparse, or the backward reaches a unit whose output hides its tensors; TypeError
    for a copy.
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
        init_part: Callable[[Placement], Tensor] | None = None,
        offload: str | None = None,
        folder: str | None = None,
        axis: str = "dp",
        broadcast_buffers: bool = True,
    ):
        super().__init__()
        arguments.require_reduce(reduce)
        self.module, self.compute_dtype = module, compute_dtype
        place_whole(module)
        arguments.require_whole(module.parameters(), "a second FSDP")
        take_over(module.parameters(), "FSDP")
        modules, root_is_unit = find_units(module, units)
        self.units = [Unit(name, m) for name, m in modules]
        comm_of, replicas_of = map(arguments.function_of_parameter, (comm, replicas))
        rest_is_replicated = not shard_rest and not root_is_unit
        memory = memory_for(offload, folder)
        groups = group_parameters(module, modules, comm_of, replicas_of, rest_is_replicated)
        for (i, cut_over, copies, *_), params in groups.items():
            unit = self.units[i]
            flat = FlatParameters(params, unit.name, cut_over, copies, compute_dtype, memory, algorithm)
            full_state.init_shards(flat, init, init_part, axis)
            unit.flats.append(flat)
            unit.gradients.append(FlatGradients(flat, reduce_dtype, reduce))
        full_state.require_values_of_buffers(module)
        self.broadcast_buffers, self._comms_of = broadcast_buffers, (comm_of, replicas_of)
        copy_buffers_of_rank0(module, self._comms_of)
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.reducer = UnitReducer(self.units, algorithm)
        self.order = UnitOrder(reshard_after_forward, prefetch)
        self._synchronised = True
        self._depth = 0  # how many nested units are in their forward
        self._end = BackwardEnd(self._finish)
        self._reset_backward_state()
        self._install_hooks()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _install_hooks(self) -> None:
        for unit in self.units:
            unit.module.forward = partial(self._unit_forward, unit, unit.module.forward)
            unit.module.compile = partial(refuse_compile, unit.name)
            for param in (p for flat in unit.flats if flat.trained for p in flat.params):
                param.register_post_accumulate_grad_hook(partial(self._on_gradient, unit))
                setattr(param, GRADIENT_RECEIVER, partial(self._take, param))

    # A forward --------------------------------------------------------------------------------------------------
    #
    # before a unit   reshard the previous one; unshard this one; prefetch the next
    # after a unit    mark it to be resharded when another unit begins

    def _unit_forward(self, unit: Unit, forward, *args, **kwargs):
        """Run the forward of a unit's module, with a hook before and a hook after it."""
        args, kwargs, has_backward = self._before_forward(unit, args, kwargs)
        try:
            outputs = forward(*args, **kwargs)
        except BaseException:
            if not in_backward():  # in a backward, recomputation stops early by raising
                self._reset()
            raise
        self._after_forward(unit, outputs, has_backward)
        return outputs

    def _before_forward(self, unit: Unit, args, kwargs):
        if not in_backward():
            if self._end.armed:
                self._abandon_backward()
            if self._depth == 0:
                self._begin_forward()
            self._depth += 1
            self.order.begin_unit(unit)
        self.order.unshard(unit, in_backward())
        has_backward = False
        if torch.is_grad_enabled():
            args, kwargs, has_backward = self._watch_inputs(unit, args, kwargs)
        if self.compute_dtype is not None:
            args, kwargs = tree_map_only(Tensor, self._cast, (args, kwargs))
        return args, kwargs, has_backward

    def _after_forward(self, unit: Unit, outputs, has_backward: bool) -> None:
        if has_backward:
            watched = [x for x in tensors_in(outputs) if x.requires_grad]
            if watched:
                register_multi_grad_hook(watched, lambda _: self._before_backward(unit), mode="any")
            else:  # perhaps there is a way round the outputs: then the backward must find the parameters unsharded
                unit.output_is_hidden = True
        keep = torch.is_grad_enabled() and not self.order.reshard_after_forward
        if unit.active == 0 and not keep and not unit.output_is_hidden:
            self.order.delay_reshard(unit)
        if not in_backward():
            self.order.end_unit(unit)
            self._depth -= 1
            if self._depth == 0:
                self._end_forward()

    def _watch_inputs(self, unit: Unit, args, kwargs):
        """Call `_after_backward` when all inputs have gradients: the unit then no longer needs its parameters.

        Also return whether the unit has a backward.
        """
        # Watch views, not the inputs themselves: then this unit is resharded before the unit that computed the input is
        # unsharded and prefetches another. A leaf's hook, unlike a view's, may also run before a parameter's gradient is
        # computed.
        args, kwargs = tree_map_only(Tensor, lambda x: x.view_as(x) if x.requires_grad else x, (args, kwargs))
        watched = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        if watched:
            register_multi_grad_hook(watched, lambda _: self._after_backward(unit), mode="all")
        return args, kwargs, bool(watched) or any(flat.trained for flat in unit.flats)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.compute_dtype) if x.is_floating_point() else x

    def _begin_forward(self) -> None:
        """Reshard what is still unsharded: an optimizer may have stepped since. See `no_sync` for the exception."""
        self.order.begin()
        for unit in self.units:
            unit.output_is_hidden = False
        for flat in self.flats:
            flat.check()
            if self._synchronised or self.order.reshard_after_forward or flat.stale():
                flat.reshard(forbid=True)
            else:
                flat.use_sharded(forbid=flat.state is State.SHARDED)
        if self.broadcast_buffers and self._synchronised and torch.is_grad_enabled():
            copy_buffers_of_rank0(self.module, self._comms_of)

    def _end_forward(self) -> None:
        """Make all parameters shards until the backward; with gradients enabled, gathered buffers keep their memory."""
        self.order.end()
        for unit in self.units:
            if torch.is_grad_enabled():
                unit.use_sharded()
            else:
                unit.reshard()

    # A backward -------------------------------------------------------------------------------------------------
    #
    # when any output of a unit has its gradient     as before its forward, with the units in reverse order
    # when a parameter has its gradient              keep it until its unit's backward ends
    # when all inputs of a unit have their gradients reshard the unit; start to reduce its gradients
    # when the backward ends                         reduce the remaining gradients; write the shards' `.grad`

    def _reset_backward_state(self) -> None:
        self._end.disarm()
        self.reducer.begin()
        for unit in self.units:
            unit.active = 0

    def _before_backward(self, unit: Unit) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True in a backward through unit {unit.name!r}: FSDP frees the parameters that a second "
                "derivative needs; use DDP or ZeroOptimizer for a gradient penalty"
            )
        if not self._end.armed:
            self._end.arm()
            for other in self.units:
                other.use_sharded(forbid=True)
        unit.active += 1
        self.order.unshard(unit, in_backward())

    def _after_backward(self, unit: Unit) -> None:
        unit.active -= 1
        if unit.active > 0:
            return
        unit.active = 0
        if self._synchronised or self.order.reshard_after_forward:
            unit.reshard(forbid=True)
        if self._synchronised:
            self.reducer.reduce(unit)

    def _on_gradient(self, unit: Unit, param: nn.Parameter) -> None:
        gradient, param.grad = param.grad, None
        if unit.output_is_hidden:
            name = self.reducer.gradients_of[param].flat.names[param]
            raise RuntimeError(
                f"the backward reached {name}, but not through the output of its unit, {unit.name!r}, in which there is "
                "no tensor to be seen; return the tensors, in containers, dataclasses or attributes of an object"
            )
        self._take(param, gradient)

    def _take(self, param: nn.Parameter, gradient: Tensor) -> None:
        self.reducer.take(param, gradient)

    def _finish(self) -> None:
        """At the end of a backward, reshard every unit, reduce the remaining gradients, and write the shards' `.grad`."""
        if not self._synchronised:
            for unit in self.units:
                unit.reshard() if self.order.reshard_after_forward else unit.use_sharded()
            self._reset_backward_state()
            return
        for unit in self.units:
            unit.reshard()
        self.reducer.finish()
        self.order.pending_reshard = None
        self._reset_backward_state()

    def _reset(self) -> None:
        """After an exception, reshard every unit and forget the unfinished forward or backward."""
        self._depth, self.order.pending_reshard = 0, None
        for unit in self.units:
            unit.reshard()
        self._reset_backward_state()

    def _abandon_backward(self) -> None:
        """Drop the gradients of a backward that an exception ended, and reset."""
        self.reducer.discard()
        self._reset()

    # For the caller ---------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose backwards accumulate full gradients; the next one outside, or `synchronize`, reduces the sum.

        With `reshard_after_forward=False`, units also stay unsharded inside: one all-gather, not one per backward.
        """
        with self._reducing(False):
            yield

    @contextmanager
    def _reducing(self, synchronised: bool):
        before, self._synchronised = self._synchronised, synchronised
        try:
            yield
        finally:
            self._synchronised = before

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now, for when no backward outside `no_sync()` follows to do so."""
        with self._reducing(True):
            self._reset_backward_state()
            self._finish()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the one-process model's state dict, on every rank, in the parameters' own dtype, on the CPU."""
        return full_state.full_state_dict(self)

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load this rank's part of a full state dict. Raises ValueError for missing, unexpected or misshapen entries."""
        full_state.load_full_state_dict(self, state)

    def summon_full_parameters(self, writeback: bool = True):
        """A context in which parameters are unsharded, in their own dtype; with `writeback`, changes to them are kept."""
        return full_state.full_parameters(self, writeback)

    def __reduce_ex__(self, protocol):
        arguments.refuse_copy("FSDP", "make another of the model and load full_state_dict() into it")
