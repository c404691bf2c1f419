"""A compressor in place of the reduction of a flat buffer of gradients.

compressed_all_reduce      every rank gets all means: DDP's and ZeRO-1's buckets, FSDP's unsharded parameters
compressed_reduce_scatter  every rank gets the means of its own chunk: ZeRO-2's buckets, FSDP's units

A layout says where each gradient is in the buffer; the padding between gradients is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.data_parallel.buckets import Layout, range_in_param, slice_of_chunk
from minipar.data_parallel.compressors import Compressor, can_scatter


@torch.no_grad()
def compressed_all_reduce(
    comm: Comm, compressor: Compressor, flat: Tensor, layout: Layout, op: str
) -> Tensor:
    """Replace the gradients in `flat` by the compressor's means or, for op="sum", sums; return `flat`."""
    parts = {key: flat[start : start + n].view(key.shape) for key, (start, n) in layout.items()}
    for key, mean in compressor.means(parts).items():
        parts[key].copy_(mean if op == "mean" else mean * comm.size)
    return flat


@torch.no_grad()
def compressed_reduce_scatter(
    comm: Comm, compressor: Compressor, flat: Tensor, layout: Layout, sizes: Sequence[int], op: str
) -> Tensor:
    """Return this rank's chunk of the compressor's means or sums of `flat` [n], with zeros in the padding.

    sizes  number of elements of each rank's chunk. A chunk's end may cut a gradient

    Raises ValueError if the compressor needs whole gradients.
    """
    if not can_scatter(compressor):
        raise ValueError(
            f"{type(compressor).__name__} needs whole gradients, and a rank keeps the mean of its own part; use ZeRO-1 or "
            "DDP, or a compressor that has scattered_means"
        )
    means = compressor.scattered_means(parts_by_rank(flat, layout, sizes))
    start = sum(sizes[: comm.rank])
    chunk = flat.new_zeros(sizes[comm.rank])
    for key, mean in means.items():
        place = chunk[slice_of_chunk(*layout[key], (start, start + len(chunk)))]
        place.copy_(mean if op == "mean" else mean * comm.size)
    return chunk


def parts_by_rank(flat: Tensor, layout: Layout, sizes: Sequence[int]) -> list[dict[Tensor, Tensor]]:
    """Return, for each rank, the pieces of the gradients in its chunk of `flat`, without empty ones."""
    parts, start = [], 0
    for size in sizes:
        found: dict[Tensor, Tensor] = {}
        for key, (first, num_elems) in layout.items():
            low, high = range_in_param(first, num_elems, (start, start + size))
            if high > low:
                found[key] = flat[first + low : first + high]
        parts.append(found)
        start += size
    return parts
