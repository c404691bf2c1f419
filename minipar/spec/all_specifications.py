"""Every specification, by name, and the door to them: `check`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from minipar.spec import (
    algorithms,
    batching,
    collectives,
    conjugates,
    context,
    data_parallel,
    fsdp,
    kv_cache,
    mesh,
    moe,
    paged,
    pipeline,
    reshard,
    schedules,
    speculation,
    tensor_parallel,
    vocab,
    whole_batch,
    zero,
)
from minipar.spec.from_file import FromFile, Subject
from minipar.spec.specification import Report, Specification, StageName

MODULES = (
    collectives,
    algorithms,
    conjugates,
    data_parallel,
    zero,
    fsdp,
    tensor_parallel,
    vocab,
    pipeline,
    schedules,
    moe,
    context,
    mesh,
    whole_batch,
    reshard,
    kv_cache,
    paged,
    speculation,
    batching,
)
SPECIFICATIONS: dict[str, Specification] = {s.name: s for module in MODULES for s in module.SPECIFICATIONS}


def find_specification(name: str) -> Specification:
    """Return the specification of this name. Raises ValueError, with the most similar name, if there is none."""
    if name in SPECIFICATIONS:
        return SPECIFICATIONS[name]
    near = get_close_matches(name.lower(), SPECIFICATIONS, 1)
    meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(SPECIFICATIONS)}"
    raise ValueError(f"name={name!r} is no specification; {meant}")


def check(
    name: str,
    implementation: Subject | str,
    stages: Iterable[StageName] | None = None,
    ranks: Iterable[int] | None = None,
    backend: str | None = None,
) -> Report:
    """Check an implementation against the specification of this name, in all stages or in these.

    implementation  a function, class or object; "FILE.py", "FILE.py:NAME", "PACKAGE.MODULE" or "PACKAGE.MODULE:NAME".
                    Without NAME it is what the specification's signature names.
    ranks           numbers of ranks, for drawn and varied cases
    backend         that of `run`: None or "gloo", "nccl", "auto"

    Raises ValueError for a name, a stage, a number of ranks, a file or a module that there is not, and for a convention
    that the specification does not know.
    """
    specification = find_specification(name)
    if stages is not None:
        stages, known = tuple(stages), [stage.name for stage in specification.stages]
        if unknown := [stage for stage in stages if stage not in known]:
            raise ValueError(f"stages={unknown[0]!r}: {name} has {', '.join(known)}")
    if ranks is not None:
        ranks = tuple(ranks)
        if wrong := [n for n in ranks if n < 1]:
            raise ValueError(f"ranks={wrong[0]}: use 1 or more")
        if not any(stage.sizes for stage in specification.stages):
            raise ValueError(f"ranks={ranks}: {name} is checked on one rank, without messages")
    if isinstance(implementation, str):
        implementation = _found(implementation, specification)
    return specification.check(implementation, stages, ranks, backend)


def _found(place: str, specification: Specification) -> FromFile:
    """Return the implementation at this place."""
    place, _, attribute = place.partition(":")
    names = (attribute,) if attribute else specification.defines
    file = Path(place)
    if file.suffix != ".py":
        try:
            found = find_spec(place)
        except Exception:  # of a package's own code: a rank says it again
            found = None
        here = Path.cwd() / place.replace(".", "/")
        if found is None and not here.with_suffix(".py").exists() and not (here / "__init__.py").exists():
            raise ValueError(f"implementation={place!r} is no file.py, and no module that can be imported")
        return FromFile(place, names)
    try:
        source = file.read_text()
        ast.parse(source, place)
    except (OSError, SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"implementation={place}{line} cannot be read: {error}") from None
    if missing := [name for name in names if not re.search(rf"\b{name}\b|import \*", source)]:
        raise ValueError(
            f"implementation={place} defines no {missing[0]}, of {specification.signature}; {place}:NAME names another"
        )
    return FromFile(str(file.resolve()), names)
