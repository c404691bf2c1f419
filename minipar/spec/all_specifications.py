"""Every specification, by name."""

from __future__ import annotations

from itertools import chain

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
SPECIFICATIONS = {s.name: s for s in chain.from_iterable(module.SPECIFICATIONS for module in MODULES)}
