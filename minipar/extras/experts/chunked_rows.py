"""Dispatch of rows in chunks, each of which is sent while the experts compute another chunk.

Each expert's rows are cut into c parts, and part i of every expert makes chunk i:

    messages   send chunk 0 | send chunk 1 | send chunk 2 | return 0 | return 1 | return 2
    products                |   chunk 0    |   chunk 1    |   chunk 2    |

All chunks are posted at the start; a Comm is a stream, so it sends them one after another. Each result is posted as soon as
it is computed. So while chunk i is computed, chunk i+1 arrives, and the results are sent back after the last chunk. The
backward runs in the reverse order: autograd posts the gradients of all results, and runs a chunk's backward when that
chunk's gradients have arrived.
Source: Tutel, arXiv:2206.03382 (adaptive pipelining); FasterMoE, doi:10.1145/3503221.3508418 (smart schedule), whose chunks
are the rows of each rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.expert.dispatch import AllToAll
from minipar.expert.dispatched_rows import DispatchedRows, RowCounts, RunExperts
from minipar.expert.overlapped_all_to_all import AllToAllRoute, transpose_segments
from minipar.support.errors import require_positive
from minipar.support.trace import span


class ChunkedAllToAll(AllToAll):
    """The `dispatch` of an `MoE` layer: `AllToAll` in `chunks` parts, each sent while the experts compute another.

    Sends up to chunks * (ep-1) messages each way, and the bytes of `AllToAll`.
    """

    def __init__(self, comm: Comm, chunks: int, node_size: int | None = None):
        require_positive(chunks=chunks)
        super().__init__(comm, overlap=True, node_size=node_size)
        self.chunks = chunks

    def __call__(self, rows: Tensor, counts: Tensor) -> ChunkedRows:
        return ChunkedRows(self.route, rows, self.row_counts(counts), self.chunks)


class ChunkedRows:
    """Rows that are dispatched in chunks, each by its own all-to-all. The arguments are those of `DispatchedRows`.

    If a rank has n rows for an expert, chunk i of c has rows n*i//c to n*(i+1)//c.

    Bytes and memory are the same as without chunks, in c times as many messages (fewer if a rank has fewer than c rows for
    another rank). A weight's gradient is a sum of c products, so it differs by rounding from the gradient without chunks.
    A row's result may differ by rounding, too, because a matrix product with fewer rows may add in a different order.
    """

    def __init__(self, route: AllToAllRoute, rows: Tensor, sizes: RowCounts, chunks: int):
        self.trace = route.comm.trace
        by_chunk = [_chunk_of(sizes, i, chunks) for i in range(chunks)]
        self.own = [[n for target in part[route.comm.rank] for n in target] for part in by_chunk]
        rows = transpose_segments(rows, list(zip(*self.own)))  # from (expert, chunk) to (chunk, expert)
        parts = torch.split(rows, [sum(of_chunk) for of_chunk in self.own])
        self.chunks = [
            DispatchedRows(route, part, counts, overlap=True) for part, counts in zip(parts, by_chunk)
        ]

    def through(self, experts: RunExperts) -> Tensor:
        """Return the experts' outputs, [R, D], in the order of the rows."""
        arriving = []
        for i, chunk in enumerate(self.chunks):
            rows, counts = chunk.receive()
            with span(self.trace, "compute", f"experts, chunk {i}"):
                out = experts(rows, counts)
            arriving.append(chunk.send_back(out, overlap=True))
        return transpose_segments(torch.cat([wait() for wait in arriving]), self.own)


def _chunk_of(sizes: RowCounts, i: int, chunks: int) -> list[list[list[int]]]:
    """Return the numbers of rows in chunk i, nested like `sizes`."""
    return [
        [[n * (i + 1) // chunks - n * i // chunks for n in of_target] for of_target in source]
        for source in sizes
    ]
