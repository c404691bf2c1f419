"""Every specification, by name."""

from __future__ import annotations

from itertools import chain

from minipar.spec import (
    collectives,
    conjugates,
    context,
    data_parallel,
    fsdp,
    mesh,
    moe,
    pipeline,
    schedules,
    tensor_parallel,
    vocab,
    zero,
)

MODULES = (
    collectives,
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
)
SPECIFICATIONS = {s.name: s for s in chain.from_iterable(module.SPECIFICATIONS for module in MODULES)}
