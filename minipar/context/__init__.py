"""Context parallelism: one sequence split over ranks, because its activations do not fit on one. In reading order:

layout.py          which tokens a rank holds: contiguous, zigzag, striped
documents.py       several documents in one sample
all_gather.py      every rank collects all keys and values
ring.py           keys and values travel around a ring
ulysses.py         all tokens of a part of the heads, by all-to-all
usp.py             Ulysses inside nodes, the ring across them
apply.py           the model with one of these in place of its attention's core
"""

from minipar.context.all_gather import all_gather_attention
from minipar.context.apply import check_context_parallel, context_parallel
from minipar.context.documents import document_positions, next_tokens, pack_documents
from minipar.context.layout import (
    LAYOUTS,
    LocalBatch,
    causal_work,
    join_local,
    local_batch,
    local_positions,
    padded_length,
    take_local,
)
from minipar.context.ring import ring_attention
from minipar.context.ulysses import ulysses_attention
from minipar.context.usp import split_comm, usp_attention
from minipar.model.flash import flash_attention

__all__ = [
    "LAYOUTS",
    "LocalBatch",
    "all_gather_attention",
    "causal_work",
    "check_context_parallel",
    "context_parallel",
    "document_positions",
    "flash_attention",
    "join_local",
    "local_batch",
    "local_positions",
    "next_tokens",
    "pack_documents",
    "padded_length",
    "ring_attention",
    "split_comm",
    "take_local",
    "ulysses_attention",
    "usp_attention",
]
