"""Comparison, before and after, of what belongs to the caller: arguments, incoming gradients, results of earlier calls.

Every implementation is called through `Watched`, whatever its specification. A Witness keeps a checksum of each tensor
and list that goes in or comes out, so that nothing is copied, and tells at the end what an implementation wrote to. It
does not look into modules, parameters and other objects, whose change may be what is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn


class Kept(NamedTuple):
    """A tensor or list, its checksum when it was seen, and the words for a change."""

    value: Any
    checksum: Any
    words: str


class Witness:
    """Keeps what was seen, and whether the implementation was `asked` anything.

    writes       the arguments, by position, that may be written to; None: it sees nothing
    conventions  those of the implementation, which gets copies if it works in place
    """

    def __init__(self, writes: tuple[int, ...] | None = (), conventions: tuple[str, ...] = ()):
        self.writes, self.conventions, self.kept = writes, conventions, list[Kept]()
        self.asked = False

    def keep(self, value: Any, words: str) -> None:
        """Keep a tensor, or a list or dict with what is in it."""
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            value = value.detach()  # of its graph nothing is kept
        if isinstance(value, Tensor | list | tuple | dict) and not isinstance(value, nn.Parameter):
            self.kept.append(Kept(value, _checksum(value), words))

    def written(self) -> str | None:
        """Describe the first change of what was kept; None if there is none."""
        return next((kept.words for kept in self.kept if _checksum(kept.value) != kept.checksum), None)


class WrongSignature(TypeError):
    """An implementation cannot be called as the specification calls it."""


class Watched:
    """An implementation, its attributes and the objects that it makes, seen by a witness at each call."""

    def __init__(self, implementation: Any, witness: Witness):
        self._watched, self._witness = implementation, witness
        self.conventions = witness.conventions

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._witness.asked = True
        names = _names(self._watched, args, options)
        if "in place" in self._witness.conventions:  # on copies: the question keeps its tensors
            args = tuple(x.clone() if isinstance(x, Tensor) and not x.requires_grad else x for x in args)
        if self._witness.writes is None:
            return self._watched(*args, **options)
        given: list[tuple[int | str, Any]] = [*enumerate(args), *options.items()]
        for place, value in given:
            if place not in self._witness.writes and "in place" not in self._witness.conventions:
                name = place if isinstance(place, str) else (names[place : place + 1] or ["an argument"])[0]
                self._witness.keep(
                    value, f"{name}{_shape(value)} was written to; the caller may still need it"
                )
        result = self._watched(*args, **options)
        for y in result if isinstance(result, tuple) else (result,):
            self._witness.keep(y, f"a later call wrote to the result{_shape(y)} of an earlier one")
            if isinstance(y, Tensor) and y.requires_grad:
                y.register_hook(self._gradient)
        makes = callable(result) and not isinstance(result, Tensor | type)
        return Watched(result, self._witness) if makes else result

    def _gradient(self, dy: Tensor) -> None:
        words = (
            f"its backward wrote to the gradient it was given{_shape(dy)}, which other operations read too"
        )
        self._witness.keep(dy, words)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._watched, name)
        return Watched(value, self._witness) if callable(value) else value


def _checksum(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor):
        data: Any = value.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy()
        return tuple(value.shape), crc32(data)
    if isinstance(value, list | tuple):
        return [_checksum(x) for x in value]
    if isinstance(value, dict):
        return {key: _checksum(x) for key, x in value.items()}
    return value if isinstance(value, int | float | str) else id(value)


def _names(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> list[str]:
    """Return the names of its parameters. Raises WrongSignature if it cannot be called with these arguments."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return []
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        found = f"{getattr(function, '__name__', type(function).__name__)}{signature}"
        raise WrongSignature(f"its signature is {found}: {error}") from None
    return list(signature.parameters)


def _shape(value: Any) -> str:
    return f" {list(value.shape)}" if isinstance(value, Tensor) else ""
