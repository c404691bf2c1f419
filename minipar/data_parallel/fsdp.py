"""FSDP, or ZeRO-3: parameters are sharded too, and a unit's parameters are unsharded only while the unit runs.

Adds to `simple/fsdp.py`: units inside units; prefetch; unused, frozen and tied parameters; hybrid sharding; mixed
precision; no_sync; recomputation; buffers that change; and recovery from exceptions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # public torch.compiler.disable would import Dynamo here
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from minipar.comm import Comm
from minipar.data_parallel import arguments
from minipar.data_parallel import fsdp_full_state as full_state
from minipar.data_parallel.backward_end import BackwardEnd, LastOf, WeakCall, in_backward, tensors_in
from minipar.data_parallel.buffers import copy_buffers_of_rank0
from minipar.data_parallel.flat_parameters import State
from minipar.data_parallel.fsdp_guards import (
    NoPartialState,
    refuse_added,
    refuse_compile,
    refuse_copy_of_fsdp,
    watch_optimizers,
)
from minipar.data_parallel.fsdp_unit import Unit, UnitOrder, UnitReducer
from minipar.data_parallel.fsdp_wrapping import Init, InitPart, UnitChoice, Wrapping, make_units
from minipar.data_parallel.gradient_reducer import take_over
from minipar.data_parallel.memory import memory_for
from minipar.data_parallel.reductions import ReduceBucket, ReduceOptions
from minipar.mesh import place_whole
from minipar.model.overrides import GRADIENT_RECEIVER

Args = tuple[Any, ...]  # the arguments of a unit's forward
Kwargs = dict[str, Any]


class UnitForward:
    """Replaces the forward of a unit's module: runs it between FSDP's two hooks.

    It has only weak references to the FSDP and the module, so that both are freed as soon as they are dropped.
    Raises RuntimeError if the FSDP was dropped but the module is used.
    """

    def __init__(self, fsdp: FSDP, i: int):
        unit = fsdp.units[i]
        forward, self._name = unit.module.forward, unit.name
        own = getattr(forward, "__self__", None) is unit.module
        # If a caller assigned a function to `module.forward`, nothing else may hold the function: keep a strong reference.
        self._inner: Callable[[], Any] = weakref.WeakMethod(forward) if own else lambda: forward
        self._fsdp, self._i = weakref.ref(fsdp), i

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fsdp = self._fsdp()
        if fsdp is None:
            raise RuntimeError(
                f"unit {self._name!r} was used after the FSDP around it was dropped, and the other ranks' parts of its "
                "parameters cannot be gathered; keep what FSDP(...) returns for as long as the module is used"
            )
        return fsdp.unit_forward(fsdp.units[self._i], self._inner(), *args, **kwargs)


class FSDP(nn.Module):
    """A wrapped module that is sharded: each of p ranks holds 1/p of its parameters, gradients and optimizer state.

    module        changed in place; every rank gets rank 0's parameters and buffers. May be on the meta device: see `init`
    comm          the ranks to shard over, or a function from parameter to Comm
    units         a module class, several in a tuple or list, or a predicate: each matching module is a unit. None: the
                  whole module is one unit
    shard_rest    True: parameters outside units form a unit, the root. False: they are replicated, and their gradients
                  all-reduced
    reshard_after_forward   reshard a unit after its forward, and unshard it again for the backward. False: keep it
                            unsharded
    compute_dtype the dtype to which shards (before the all-gather), parameters that are not sharded, and floating-point
                  inputs of units are cast
    reduce_dtype  the dtype in which gradients are summed, over ranks and over backwards; default: the parameters' dtype.
                  If it is wider, the sums are held in it, too: for float32, 4/p bytes more per parameter
    reduce        "mean" or "sum" over the ranks, as in DDP
    prefetch      all-gather the next unit while this one computes
    replicas      for hybrid sharding: the ranks that hold the same shard, as a Comm or a function from parameter to Comm
    init          for a module on the meta device: (canonical name, shape) -> the parameter's value. Or init_part:
                  Placement -> the value of that part, so that no rank makes the whole parameter
    offload       None, "cpu" or "disk": the memory that holds the shards; `folder` for the files
    broadcast_buffers   copy rank 0's buffers (running means, say) to the other ranks before each forward
    per_element   True: allow the step of an optimizer that is not known to update each element from that element alone
    reduce_bucket what starts to reduce a unit's gradients, in place of `reduce_plainly`: see reductions.py

    forward       w = all_gather(shard)                              unit by unit, before the unit runs
    backward      w = all_gather(shard) again;  shard.grad = 1/p reduce_scatter(w.grad)

    Wrap first, then make the optimizer from `parameters()`, which are now flat shards, as are their gradients. The
    optimizer must be per-element: unless `per_element` is True, its first step raises if its class is not known to be. Clip
    with `minipar.clip_grad_norm_(shards, max_norm, comm)`: torch's own function raises on shards, since it would use the
    norm of a shard as that of the parameter. All ranks must run the same units in the same order. Messages carry the unit's
    name, so ranks that run different units get a deadlock that names both; not with torch's own collectives, as on NCCL.
    The unit whose forward ends last stays unsharded, since its backward comes first. torch.compile cannot trace the hooks:
    a compiled module may be a unit, FSDP(torch.compile(module), comm), or be inside a unit, but it may not contain a unit.
    torch.compile(FSDP(module, comm)) compiles the forwards of user-defined modules, but neither the hooks nor torch's
    containers.

    Save and load with `full_state_dict`, `load_full_state_dict` or, inside `summon_full_parameters`, as ever. Elsewhere
    `state_dict` and `load_state_dict` of any module with shards inside raise, as does `state_dict` of an optimizer that has
    stepped with shards: each would be one rank's part. minipar.extras.checkpoints.dcp writes all parts.

    Sends per step (p-1)/p of each unit: twice in compute_dtype to all-gather it (the unit whose forward ends last, once),
    and, if it is trained, once in reduce_dtype to reduce-scatter its gradients. Each parameter is rounded up to 64 elements
    and each unit to 64p. Also sends an all-reduce
    of one byte per parameter. For P parameters, a step sends 3P elements in all, where DDP sends 2P. A forward with
    gradients and outside `no_sync` broadcasts the buffers: all ranks together send the buffers' bytes p-1 times.
    Holds the shards and at most three unsharded units: the root, the running unit and the next unit. In the backward of one
    activation checkpoint over several units, also those of them with a frozen parameter.
    Raises ValueError for a bad argument, for ranks whose models or options differ or, in `step`, for an optimizer that
    is not known to be per-element; RuntimeError where `step` comes while gradients accumulated under `no_sync` are not
    reduced, a resharded parameter is used, a parameter was moved, thawed, added or replaced, one rank's part would be
    saved or loaded, a gradient is sparse, or the backward reaches a unit in whose output FSDP found no tensor that
    requires a gradient (it searches containers and attributes); TypeError for a copy of the wrapper or of a module with
    shards inside.
    Source: ZeRO, arXiv:1910.02054, section 5.3; PyTorch FSDP, arXiv:2304.11277, sections 3 and 4.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | arguments.CommOf,
        units: UnitChoice = None,
        shard_rest: bool = True,
        reshard_after_forward: bool = True,
        compute_dtype: torch.dtype | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        reduce: str = "mean",
        prefetch: bool = True,
        algorithm: str = "auto",
        replicas: Comm | Callable[[Tensor], Comm | None] | None = None,
        init: Init | None = None,
        init_part: InitPart | None = None,
        offload: str | None = None,
        folder: str | None = None,
        axis: str = "dp",
        broadcast_buffers: bool = True,
        per_element: bool = False,
        reduce_bucket: ReduceBucket | None = None,
    ):
        super().__init__()
        if reduce_bucket is not None and replicas is not None:
            raise ValueError(
                "reduce_bucket replaces one reduction, and replicas add a second one; use one of the two"
            )
        reduction = ReduceOptions.of(reduce, algorithm, reduce_dtype, reduce_bucket)
        self._comms_of = arguments.function_of_parameter(comm), arguments.function_of_parameter(replicas)
        self.module, self.compute_dtype, self.broadcast_buffers = module, compute_dtype, broadcast_buffers
        shared = dict(
            shard_rest=shard_rest, reshard_after_forward=reshard_after_forward, compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype, reduce=reduce, prefetch=prefetch, algorithm=algorithm,
            broadcast_buffers=broadcast_buffers, reduce_bucket=reduce_bucket is not None,
            on_meta_device=any(p.is_meta for p in module.parameters()),
        )  # fmt: skip
        place_whole(module)
        arguments.require_whole(module.parameters(), "a second FSDP")
        take_over(module.parameters(), "FSDP")
        memory = memory_for(offload, folder)
        how = Wrapping(*self._comms_of, shard_rest, compute_dtype, reduction, memory, init, init_part, axis)
        self.units = make_units(module, units, how, shared)
        copy_buffers_of_rank0(module, self._comms_of)
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.reducer = UnitReducer(self.units, algorithm)
        self.order = UnitOrder(reshard_after_forward, prefetch)
        self._depth = 0  # the number of nested units that are in their forward
        self._end = BackwardEnd(self._finish, self._use_sharded)
        self._reset_backward_state()
        self._install_hooks()
        shards = {p for flat in self.flats if not flat.whole for p in flat.params}
        self.no_partial_state = NoPartialState(module, shards)
        watch_optimizers(self, shards, per_element)

    @_disable_dynamo(recursive=False)  # torch.compile(FSDP(module)) traces the module alone
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _install_hooks(self) -> None:
        for i, unit in enumerate(self.units):
            unit.module.forward = UnitForward(self, i)
            unit.module.compile = partial(refuse_compile, unit.name)  # type: ignore[method-assign]  # on purpose
            for param in (p for flat in unit.flats if flat.trained for p in flat.params):
                param.register_post_accumulate_grad_hook(WeakCall(self._on_gradient, i))
                setattr(param, GRADIENT_RECEIVER, WeakCall(self._receive, weakref.ref(param)))

    # A forward --------------------------------------------------------------------------------------------------
    #
    # before a unit   reshard the previous unit; unshard this unit; prefetch the next
    # after a unit    mark it to be resharded when another unit begins

    @_disable_dynamo(recursive=False)
    def unit_forward(self, unit: Unit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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

    @_disable_dynamo
    def _before_forward(self, unit: Unit, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs, bool]:
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

    @_disable_dynamo
    def _after_forward(self, unit: Unit, outputs: object, has_backward: bool) -> None:
        if torch.is_grad_enabled():
            watched = [x for x in tensors_in(outputs) if x.requires_grad]
            if watched:
                register_multi_grad_hook(watched, lambda _: self._before_backward(unit), mode="any")
            elif (
                has_backward
            ):  # the backward may reach it by another path, and must then find its parameters unsharded
                unit.output_is_hidden = True
        keep = torch.is_grad_enabled() and not self.order.reshard_after_forward
        # torch's checkpoint keeps a frozen parameter itself, not a view: the recomputed one must stay until it is used.
        keep |= in_backward() and any(not flat.trained for flat in unit.flats)
        if unit.active == 0 and not keep and not unit.output_is_hidden:
            self.order.delay_reshard(unit)
        if not in_backward():
            self.order.end_unit(unit)
            self._depth -= 1
            if self._depth == 0:
                self._end_forward()

    def _watch_inputs(self, unit: Unit, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs, bool]:
        """Call `_after_backward` when all inputs have gradients, since the unit then no longer needs its parameters.

        A unit with an input that gets no gradient in a backward keeps its parameters until that backward ends.
        Returns whether the unit surely has a backward.
        """
        # Watch views, not the inputs themselves. An input may also be the output of another unit, whose hook would run
        # first: it would unshard that unit, and prefetch a third, before this unit is resharded. Also, the hook of an input
        # that is a leaf may run before a parameter's gradient is computed; the hook of a view may not.
        args, kwargs = tree_map_only(Tensor, lambda x: x.view_as(x) if x.requires_grad else x, (args, kwargs))
        watched = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        hook = LastOf(len(watched), partial(self._after_backward, unit))
        for x in watched:
            x.register_hook(hook)
        return args, kwargs, bool(watched) or unit.trained

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.compute_dtype) if x.is_floating_point() else x

    def _begin_forward(self) -> None:
        """Reshard units left unsharded, since an optimizer may have changed their shards. Under `no_sync` some may stay."""
        self.order.begin()
        for unit in self.units:
            unit.output_is_hidden = False
        self.check()
        for flat in self.flats:
            if self.reducer.synchronised or self.order.reshard_after_forward or flat.stale():
                flat.reshard(forbid=True)
            else:
                flat.use_sharded(forbid=flat.state is State.SHARDED)
        if self.broadcast_buffers and self.reducer.synchronised and torch.is_grad_enabled():
            copy_buffers_of_rank0(self.module, self._comms_of)

    def check(self) -> None:
        """Raise RuntimeError if parameters were moved, cast, thawed, added or replaced since the module was wrapped."""
        self.no_partial_state.check()
        for flat in self.flats:
            flat.check()
        refuse_added(self.module, self.reducer.gradients_of)

    def _end_forward(self) -> None:
        """Make all parameters shards again. With gradients enabled, unsharded flat buffers keep memory for the backward."""
        self.order.end()
        for unit in self.units:
            if torch.is_grad_enabled():
                unit.use_sharded()
            else:
                unit.reshard()

    # A backward -------------------------------------------------------------------------------------------------
    #
    # when any output of a unit has its gradient     the same as before its forward, with the units in reverse order
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
        if self.reducer.synchronised or self.order.reshard_after_forward:
            unit.reshard(forbid=True)
        if self.reducer.synchronised:
            self.reducer.reduce(unit)

    def _on_gradient(self, i: int, param: nn.Parameter) -> None:
        unit = self.units[i]
        gradient, param.grad = param.grad, None
        assert gradient is not None
        if unit.output_is_hidden:
            name = self.reducer.gradients_of[param].flat.names[param]
            raise RuntimeError(
                f"the backward reached {name}, but not through the output of its unit, {unit.name!r}, in which there is "
                "no tensor to be seen; return the tensors, in containers, dataclasses or attributes of an object"
            )
        self.reducer.collect_grad(param, gradient)

    def _receive(self, param_ref: weakref.ref[nn.Parameter], gradient: Tensor) -> None:
        if (param := param_ref()) is not None:
            self.reducer.collect_grad(param, gradient)

    def _finish(self) -> None:
        """At the end of a backward, reshard every unit, reduce the remaining gradients, and write the shards' `.grad`."""
        stays = not self.reducer.synchronised and not self.order.reshard_after_forward
        for unit in self.units:
            unit.use_sharded() if stays else unit.reshard()
        if self.reducer.synchronised:
            self.reducer.finish()
        else:
            self.reducer.accumulates = bool(self.reducer.used)
        self._reset_backward_state()

    def _use_sharded(self) -> None:
        """Give the parameters back their gradients of earlier backwards, which an optimizer may zero or use."""
        for unit in self.units:
            unit.use_sharded()

    def _reset(self) -> None:
        """After an exception, reshard every unit and forget the unfinished forward or backward."""
        self._depth = 0
        self.reshard()
        self._reset_backward_state()

    def _abandon_backward(self) -> None:
        """Drop the gradients of a backward that an exception ended, and reset. Those of earlier backwards stay."""
        if self.reducer.accumulates:
            raise RuntimeError(
                "an exception ended a backward, which had added to the gradients that earlier backwards accumulated under "
                "no_sync(); call zero_grad() of this FSDP, and begin the step anew"
            )
        self.reducer.discard()
        self._reset()

    # For the caller ---------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards accumulate full gradients.

        The next backward outside it, or `synchronize`, reduces the sum. FSDP holds these gradients apart from the shards'
        `.grad`: its own `zero_grad` drops them, an optimizer's `zero_grad` cannot. With `reshard_after_forward=False`,
        units also stay unsharded inside the context, so there is one all-gather instead of one per backward.
        """
        return self.reducer.reducing(False)

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now. Call it if the last backward ran inside `no_sync()`."""
        if self._end.armed:
            self._abandon_backward()
        with self.reducer.reducing(True):
            self._reset_backward_state()
            self._finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the shards' gradients, and drop those that are not reduced yet."""
        super().zero_grad(set_to_none)
        self.reducer.discard()

    def reshard(self) -> None:
        """Free every unit's unsharded parameters. The next forward or backward of a unit gathers them again.

        Call it to end what `no_sync` began with `reshard_after_forward=False`, but not inside a forward or a backward.
        """
        for unit in self.units:
            unit.reshard()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the one-process model's state dict, on every rank, in the parameters' own dtype, on the CPU."""
        self.check()
        return full_state.full_state_dict(self.module, self.flats)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's part of a full state dict. Raises ValueError for missing, unexpected or misshapen entries."""
        self.check()
        full_state.load_full_state_dict(self.module, self.flats, state)

    @contextmanager
    def summon_full_parameters(self, writeback: bool = True) -> Iterator[None]:
        """Return a context in which parameters are unsharded, in their own dtype; `writeback` keeps changes to them."""
        self.check()
        with full_state.full_parameters(self.flats, self.no_partial_state, writeback):
            yield

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy_of_fsdp()
