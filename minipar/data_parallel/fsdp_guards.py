"""Refusals of FSDP: hooks that come too early, one rank's part of a state, freed parameters, optimizers of whole rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from minipar.data_parallel.arguments import ELEMENTWISE_OPTIMIZERS, is_per_element, refuse_copy
from minipar.mesh import placement_of
from minipar.support.errors import one_of

# Before it is wrapped ---------------------------------------------------------------------------------------------


def require_shardable(root: nn.Module, units: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise ValueError if a unit's weight is computed too early, a unit is traced, or a buffer has no value."""
    for name, module in units:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                raise ValueError(
                    f"torch.nn.utils.{hook.__module__.split('.')[-1]} of unit {name!r} computes {hook.name} before "
                    "the unit's forward, which is too early; use the one in torch.nn.utils.parametrizations"
                )
    for around in root.modules():
        in_place = getattr(around, "_compiled_call_impl", None) is not None
        if not in_place and type(around).__name__ != "OptimizedModule":
            continue
        inside = {id(m) for m in around.modules() if in_place or m is not around}
        for name in (name for name, m in units if id(m) in inside):
            raise ValueError(
                f"unit {name!r} is inside what torch.compile traces, which cannot trace FSDP's hooks; make what "
                "torch.compile(module) returns the unit, or compile modules inside the units"
            )
    for name, buffer in root.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"the buffer {name} is on the meta device; give it a value before the module is wrapped"
            )


# Afterwards --------------------------------------------------------------------------------------------------------


def refuse_compile(name: str, *_: object, **__: object) -> None:
    """Raise RuntimeError. This function replaces the `compile` method of a wrapped module."""
    raise RuntimeError(
        f"unit {name!r} is wrapped in FSDP, whose hooks torch.compile cannot trace; compile first, and make what "
        "torch.compile(module) returns the unit, or compile modules inside it"
    )


class NoPartialState:
    """A hook of each module with shards inside: its `state_dict` and `load_state_dict` raise, as does a copy of the module.

    whole   True inside `summon_full_parameters`: the parameters are not shards, and these raise nothing, but `check` does
    """

    def __init__(self, module: nn.Module, shards: set[nn.Parameter]) -> None:
        self.whole = False
        for m in module.modules():
            if not shards.isdisjoint(m.parameters()):
                m.register_state_dict_pre_hook(self.before_save)
                m.register_load_state_dict_pre_hook(self.before_load)

    def check(self) -> None:
        if self.whole:
            raise RuntimeError(
                "inside summon_full_parameters() FSDP neither runs nor gathers; use the module's own state_dict() and "
                "load_state_dict() there, and everything else outside"
            )

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self.whole and not keep_vars:  # keep_vars=True asks for the parameters themselves
            raise RuntimeError(
                f"state_dict() of {type(module).__name__}, which FSDP has sharded, would be this rank's part alone; use "
                "full_state_dict() of the FSDP, called on every rank (save_pretrained takes it as state_dict=), or call "
                "state_dict() inside summon_full_parameters()"
            )

    def before_load(self, module: nn.Module, *args: Any) -> None:
        if not self.whole:
            raise RuntimeError(
                f"load_state_dict() of {type(module).__name__}, which FSDP has sharded, would load this rank's part alone; "
                "use load_full_state_dict(state) of the FSDP"
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy_of_fsdp()


def refuse_copy_of_fsdp() -> NoReturn:
    refuse_copy("FSDP", "make another of the model and load full_state_dict() into it")


def refuse_added(module: nn.Module, known: Iterable[nn.Parameter]) -> None:
    """Raise RuntimeError if parameters were added or replaced since the module was wrapped."""
    wrapped = set(known)
    for name, param in module.named_parameters():
        if param not in wrapped:
            raise RuntimeError(
                f"the parameter {name} was added or replaced after FSDP had wrapped the module, and ranks would not "
                "train it alike; change the module first, then wrap it"
            )


# A parameter outside its unit --------------------------------------------------------------------------------------


class FreedParameter(nn.Parameter):
    """The class of a parameter while its unit is resharded: computing with it raises, inspecting it does not."""

    freed: tuple[str, str]  # the parameter's name, and its unit's name

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in INSPECTING:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        freed = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, FreedParameter)), None)
        name, unit = freed.freed if freed is not None else ("a parameter", "?")
        raise RuntimeError(
            f"{name} was used while unit {unit!r}, which it belongs to, is freed: this rank has only a part of it. "
            "Use it inside the forward of that unit, or leave it to the unit around both"
        )


INSPECTING = ("__get__", "__set__", "size", "dim", "numel", "data_ptr", "is_floating_point", "__repr__", "__hash__",
           "register_hook", "register_post_accumulate_grad_hook", "requires_grad_")  # fmt: skip


def forbid_use(param: nn.Parameter, name: str, unit: str) -> None:
    """Make it an error to compute with the parameter. The error names the parameter and its unit."""
    if param.__class__ is nn.Parameter:
        param.__class__ = FreedParameter
        assert isinstance(param, FreedParameter)
        param.freed = (name, unit)


def allow_use(param: nn.Parameter) -> None:
    if param.__class__ is FreedParameter:
        param.__class__ = nn.Parameter  # type: ignore[assignment]  # mypy narrowed it in the `if`


def watch_optimizers(fsdp: nn.Module, shards: Iterable[nn.Parameter], per_element: bool) -> None:
    """Watch every optimizer that steps with one of `shards`: its `state_dict` raises RuntimeError from then on.

    The step raises RuntimeError while gradients wait under `no_sync`, since it would leave them out; what a closure of the
    step does is not seen.
    Unless `per_element`, it raises ValueError if the optimizer is not known to be per-element.
    The check is a hook on every optimizer's step of this process, removed when `fsdp`, which owns the shards, is freed: an
    optimizer reads only the parameters' values and gradients, so nothing else of FSDP's sees it.
    """
    ids = {id(p) for p in shards}
    owner: Callable[[], Any] = weakref.ref(fsdp)  # not FSDP itself, which this hook would keep alive
    watched = weakref.WeakSet[torch.optim.Optimizer]()

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not any(id(p) in ids for g in optimizer.param_groups for p in g["params"]):
            return
        if owner().reducer.accumulates:
            raise RuntimeError(
                "gradients accumulated under no_sync() are not reduced, so the shards have none or a part; call "
                "synchronize() of the FSDP before you clip and step"
            )
        if optimizer in watched:
            return
        name = type(optimizer).__name__
        if not per_element and not is_per_element(type(optimizer)):
            raise ValueError(
                f"{name} is not known to update each element from that element alone, and FSDP's "
                f"parameters are flat shards; use {one_of(ELEMENTWISE_OPTIMIZERS)}, pass per_element=True to FSDP if it "
                "does, or use DDP or WholeParameterZero, which cut no parameter"
            )
        for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in ids):
            if any(
                isinstance(x, Tensor) and x.dim() and x.shape != p.shape
                for x in optimizer.state.get(p, {}).values()
            ):
                raise ValueError(
                    f"{name} has state of {placement_of(p).name} from before FSDP sharded it; make the "
                    "optimizer after FSDP, from its parameters()"
                )
        optimizer.register_state_dict_pre_hook(_refuse_state_of_shards)
        watched.add(optimizer)

    weakref.finalize(fsdp, register_optimizer_step_pre_hook(check).remove).atexit = False


def _refuse_state_of_shards(optimizer: torch.optim.Optimizer) -> NoReturn:
    raise RuntimeError(
        f"state_dict() of {type(optimizer).__name__} over FSDP's shards would be this rank's part alone; save the weights "
        "by full_state_dict() of the FSDP, and this state by optimizer_parts() and save() of the extra checkpoints.dcp, "
        "which any number of ranks can load"
    )
