"""The places of parameters in a flat buffer, and the chunks into which ranks cut the buffer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from minipar.comm import Comm

# parameter -> (start, number of elements) of its place in a flat buffer
Layout = Mapping[Tensor, tuple[int, int]]


class FlatLayout:
    """Parameters in one flat buffer of `size` elements, with padding between and after them.

    comm    the ranks that cut the buffer into chunks; None: the buffer is one chunk
    layout  parameter -> (start, number of elements); each start is a multiple of `alignment`
    shapes  parameter -> its full shape
    end     the start of the `num_flags` elements behind the parameters
    sizes   the number of elements of each rank's chunk
    range   (start, end) of this rank's chunk
    """

    def __init__(self, params: list[nn.Parameter], comm: Comm | None, alignment: int, num_flags: int = 0):
        self.params, self.end = params, 0
        self.shapes = {p: tuple(p.shape) for p in params}
        self.layout: dict[Tensor, tuple[int, int]] = {}
        for param in params:
            self.layout[param] = self.end, param.numel()
            self.end = round_up(self.end + param.numel(), alignment)
        num_ranks, rank = (1, 0) if comm is None else (comm.size, comm.rank)
        self.size = round_up(self.end + num_flags, alignment * num_ranks)
        self.sizes = self.chunk_sizes(num_ranks)
        start = sum(self.sizes[:rank])
        self.range = (start, start + self.sizes[rank])

    def chunk_sizes(self, num_ranks: int) -> list[int]:
        """Return the number of elements of each rank's chunk; here all are equal."""
        return [self.size // num_ranks] * num_ranks

    def part(self, param: nn.Parameter) -> tuple[int, int]:
        """Return (start, end) of this rank's part in the flattened parameter."""
        return range_in_param(*self.layout[param], self.range)

    def slice_of_full(self, param: nn.Parameter, flat: Tensor) -> Tensor:
        """Return the parameter's elements in a buffer [size], in the parameter's full shape."""
        start, n = self.layout[param]
        return flat[start : start + n].view(self.shapes[param])

    def slice_of_chunk(self, param: nn.Parameter, chunk: Tensor) -> Tensor:
        """Return the parameter's elements in a tensor that is laid out like this rank's chunk."""
        return chunk[slice_of_chunk(*self.layout[param], self.range)]


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def range_in_param(start: int, num_elems: int, chunk: tuple[int, int]) -> tuple[int, int]:
    """Return (start, end) of the elements of a flattened tensor that lie in `chunk`.

    The tensor begins at offset `start` of a flat buffer; `chunk` is a range (start, end) of that buffer.
    """
    low, high = (min(max(edge - start, 0), num_elems) for edge in chunk)
    return low, high


def slice_of_chunk(start: int, num_elems: int, chunk: tuple[int, int]) -> slice:
    """Return the slice of the chunk that holds the tensor's elements; empty if the two do not overlap."""
    low, high = range_in_param(start, num_elems, chunk)
    at = start + low - chunk[0] if high > low else 0
    return slice(at, at + high - low)
