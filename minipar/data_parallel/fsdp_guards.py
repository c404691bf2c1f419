"""What FSDP refuses: modules whose hooks come too early, states of one rank's part, and freed or changed parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves

from minipar.data_parallel.arguments import refuse_copy

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
