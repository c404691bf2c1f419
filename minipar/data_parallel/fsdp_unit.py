"""A unit: a module whose parameters are gathered when it runs and freed after; and which module has which parameters."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel.flat_parameters import FlatParameters


class Unit:
    """The flat parameters of one module, those of units inside it left out.

    active   how many of its calls are in the middle of their backward
    """

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module = name, module
        self.flats: list[FlatParameters] = []
        self.active = 0

    @property
    def filled(self) -> bool:
        return all(flat.filled or flat.whole for flat in self.flats)

    def gather(self, algorithm: str) -> None:
        for flat in self.flats:
            flat.gather(algorithm)

    def show_full(self) -> None:
        for flat in self.flats:
            flat.show_full()

    def show_shard(self, guarded: bool = False) -> None:
        for flat in self.flats:
            flat.show_shard(guarded)

    def free(self, guarded: bool = False) -> None:
        for flat in self.flats:
            flat.free(guarded)

    def reduce(self, op: str, algorithm: str) -> None:
        for flat in self.flats:
            flat.reduce(op, algorithm)

    def settle(self, op: str, algorithm: str) -> None:
        for flat in self.flats:
            flat.settle(op, algorithm)


def find_units(module: nn.Module, units) -> tuple[list[tuple[str, nn.Module]], bool]:
    """(name, module) of the root and of every module that `units` matches, outer ones first; is the root a match?"""
    if units is None:
        return [("root", module)], True
    matches = units
    if isinstance(units, type | tuple):

        def matches(m):
            return isinstance(m, units)

    found = [(name, m) for name, m in module.named_modules() if m is not module and matches(m)]
    if not found and not matches(module):
        raise ValueError(
            f"units={units!r} matches no module inside {type(module).__name__}; "
            "use a module class, a tuple of them, a predicate, or None for all of it as one unit"
        )
    return [("root", module), *found], matches(module)


def owners(modules: list[tuple[str, nn.Module]]) -> dict[nn.Parameter, int]:
    """parameter -> number of the unit that has it: the innermost one around it.

    What is tied across units that are not inside one another belongs to the innermost unit around them all, so that it
    is whole while either runs.
    """
    inside = [set(map(id, m.modules())) for _, m in modules]
    chains: dict[nn.Parameter, list[int]] = {}  # units around every place where the parameter is, outer first
    for module in modules[0][1].modules():
        around = [i for i, ids in enumerate(inside) if id(module) in ids]
        for param in module.parameters(recurse=False):
            before = chains.get(param, around)
            chains[param] = [i for i in around if i in before]
    return {param: chain[-1] for param, chain in chains.items()}


def per_parameter(comm) -> Callable[[Tensor], Comm | None]:
    return (lambda _: comm) if isinstance(comm, Comm | None) else comm


def group_parameters(module, modules, comm_of, replicas_of, rest_is_whole) -> dict[tuple, list[nn.Parameter]]:
    """(unit, comm or None if whole, Comms with copies, ...) -> parameters that can share a flat buffer."""
    owner, groups = owners(modules), {}
    for param in module.parameters():
        comm, replicas = comm_of(param), replicas_of(param)
        copies = () if replicas is None else (replicas,)
        if rest_is_whole and owner[param] == 0:
            comm, copies = None, (comm, *copies)
        key = (owner[param], comm, copies, param.dtype, param.requires_grad)
        groups.setdefault(key, []).append(param)
    return groups
