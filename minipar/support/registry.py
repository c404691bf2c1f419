"""Settings that a run chooses by name, and the extras that add choices. Imports no torch.

A package of minipar declares a `Kind` of choice, with its own choices. An extra, from this project or another, adds a
choice by an entry point in the group "minipar.extras", named by the `Kind` and the choice:

    [project.entry-points."minipar.extras"]
    "schedule.v-min" = "minipar.extras.schedules.choices:V_MIN"

Names are read from the installed packages' metadata, and an extra is imported only when its name is used, or, if it is
of minipar itself, when `--help` says what it is for. If an extra's folder is removed, its names disappear and everything
else still works.

    kind         chosen by              a choice is                             the interface of what it loads
    algorithm    --algorithm            a way to compute collectives            comm/collectives.py
    schedule     --schedule             an order of the pipeline's work         schedules/registry.py
    timeline     minipar timeline       a schedule that is only drawn           schedules/registry.py
    optimizer    --optimizer            an optimizer over any mesh              train/optim.py
    compress     --compress             a way to average gradients              train/averaging.py
    offload      --offload              the memory in which states are stored   data_parallel/memory.py
    tp_layout    --tp-layout            how tp cuts matrices                    train/parallelize.py
    dispatch     --dispatch             a way to send tokens to experts         expert/dispatch.py
    products     --products             how linear layers multiply              model/products.py
    membership   --membership           which ranks a run has                   train/trainer.py
    view         minipar plan --view    a term of the cost, or another answer   cost/plan_command.py
    server       minipar serve --NAME   how requests arrive                     cli/serve.py
    instead      minipar train --NAME   an action in place of training          cli/train.py
    command      minipar NAME           a command                               cli/__init__.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Generic, NamedTuple, TypeVar

from minipar.support.errors import one_of

GROUP = "minipar.extras"  # of entry points
OURS = "minipar"  # the package whose extras `--help` imports


class Choice:
    """An option that a run chooses by name, such as a schedule: its metadata, available without importing torch.

    The choices of a `Kind` may have a subclass with more methods.

    help            a few words for `--help`
    implementation  "module:name" of the choice's code, imported by `load`
    options         None, or a frozen dataclass of `option` fields: the flags --KIND.FIELD, and the table [KIND] in TOML
    unpriced        what the planner's predictions leave out: None, nothing; "", the choice itself; or the name of an option
    """

    help: str = ""
    implementation: str = ""
    options: type | None = None
    unpriced: str | None = None

    def __init__(self, implementation: str = "", help: str = "", options: type | None = None):
        self.implementation = implementation or self.implementation
        self.help, self.options = help or self.help, options or self.options

    def load(self) -> Any:
        """Import and return the code of this choice."""
        module, _, name = self.implementation.partition(":")
        return getattr(import_module(module), name)

    def check(self, config: Any) -> None:
        """Raise ValueError, before any rank starts, if this choice does not fit the rest of a TrainConfig."""

    def check_paths(self, config: Any) -> None:
        """Raise ValueError if a file or a folder that the options name cannot be used."""

    def variants(self, config: Any) -> Iterable[dict[str, Any]]:
        """Return the values of `options` that `minipar verify --all` tries in turn."""
        return ({},)


C = TypeVar("C", bound=Choice)


class Found(NamedTuple):
    """An extra's entry point, and the package that provides it."""

    entry: EntryPoint
    package: str

    @property
    def source(self) -> str:
        return f"{self.entry.value} of the package {self.package}"


class Kind(Mapping[str, C], Generic[C]):
    """The choices of one kind, such as the schedules, by name: first minipar's own, then the installed extras'.

    Iterating yields names and imports no extra; `kind[name]` imports the extra with that name.
    Raises ValueError for a name that no choice has or that two choices have, or if its extra cannot be imported.
    """

    def __init__(self, name: str, own: Mapping[str, C]):
        self.name, self.own = name, dict(own)

    def __getitem__(self, name: str) -> C:
        found = _installed().get((self.name, name), [])
        sources = ["minipar itself"] * (name in self.own) + [one.source for one in found]
        if len(sources) > 1:
            raise ValueError(
                f"{self.name}={name!r} is the name of two: {' and '.join(sources)}; remove one package"
            )
        if name in self.own:
            return self.own[name]
        if not found:
            known = f"use {self._one_of(name)}" if len(self) else "no package that is installed brings one"
            raise ValueError(f"{self.name}={name!r} is unknown; {known}")
        try:
            choice: C = found[0].entry.load()
            return choice
        except Exception as error:  # another project's module may raise anything while it is imported
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(
                f"{self.name}={name!r} is {found[0].source}, which cannot be imported: {why}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name in self.extras() if name not in self.own)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.extras()

    def declared(self) -> dict[str, Found]:
        """Return the names that installed packages declare, even if their modules are missing. Imports no extra."""
        return {name: found[0] for (kind, name), found in sorted(_installed().items()) if kind == self.name}

    def extras(self) -> dict[str, str]:
        """Return the names that extras add, each with its package. Imports no extra."""
        return {
            name: found.package
            for name, found in self.declared().items()
            if _is_there(found.entry.module, tuple(sys.path))
        }

    def summaries(self) -> dict[str, str]:
        """Return all names, each with its few words for `--help`; of another package's extra, only the package.

        Imports the extras of minipar itself, and no others.
        """
        packages = self.extras()
        found = {}
        for name in self:
            package = packages.get(name, OURS)
            try:
                found[name] = self[name].help if package == OURS else f"an extra of the package {package}"
            except ValueError:  # the name of two, or a folder of which a part was removed
                found[name] = f"an extra of the package {package}"
        return found

    def usable(self) -> dict[str, C]:
        """Return the choices that can be imported, by name, for a sweep over all of them."""
        found = {}
        for name in self:
            try:
                found[name] = self[name]
            except ValueError:
                continue
        return found

    def _one_of(self, near: str) -> str:
        packages = self.extras()
        choices = one_of(self, near=near)
        brought = next((name for name in packages if choices.endswith(f"did you mean {name}?")), None)
        return choices if brought is None else f"{choices} (of the package {packages[brought]})"


def _installed() -> dict[tuple[str, str], list[Found]]:
    """Return the entry points of all extras by (`Kind`, choice); they are read again if sys.path has changed."""
    return _read(tuple(sys.path))


@lru_cache(maxsize=4)
def _read(path: tuple[str, ...]) -> dict[tuple[str, str], list[Found]]:
    found: dict[tuple[str, str], list[Found]] = {}
    for entry in entry_points(group=GROUP):
        kind, _, name = entry.name.partition(".")
        package = entry.dist.name if entry.dist is not None else "?"
        found.setdefault((kind, name), []).append(Found(entry, package))
    return found


@cache  # a configuration asks for every choice of every kind, and the answer reads folders
def _is_there(module: str, path: tuple[str, ...]) -> bool:
    """Return whether the module can be found, with sys.path as in `path`. Imports nothing, not even its parent packages."""
    top, *inside = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return False
    for name in inside:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is not None
