"""An error on using a parameter while its unit is resharded and this rank has only a part of the parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


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
        freed = next((x for x in _tensors([args, kwargs]) if isinstance(x, FreedParameter)), None)
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


def _tensors(nested: Mapping[Any, Any] | Iterable[Any]) -> Iterator[Tensor]:
    for x in nested.values() if isinstance(nested, Mapping) else nested:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple | dict):
            yield from _tensors(x)
