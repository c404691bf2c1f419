"""A sketch of a sparse vector: sums of its elements, from which it is recovered. Sketches can be added up on the way.

row 0   x3 + x7 | x1      | x9             each element is added to one cell of each row
row 1   x9      | x7 + x1 | x3             x1 is alone in row 0, so x1 is known; without it, x7 is alone in row 1
row 2   x1 + x3 | x7      | x9
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from minipar.extras.compress.codecs import pack_bits
from minipar.model.counter_dropout import mix

ROWS = 3
LOW_32 = 0xFFFFFFFF


class Sketch:
    """The sketch of vectors that are zero except at known places.

    places     [n] bool, True where any vector may be nonzero: the same on every rank
    num_cells  number of sums, a multiple of 3

    of(x)[c] = sum of the elements of x in cell c      so of(x) + of(y) = of(x + y)
    recover    peels: an element that is alone in a cell is that cell's sum; it is subtracted from its other cells, in which
               another element may then be alone

    Which elements can be recovered depends on the places alone, so every rank knows `recovered` without the sums. For large
    m, all of m random places can be recovered from c cells if m < 0.818 c, and less than half of them if m is larger. The
    hash that assigns cells depends on the places, so elements that cannot be recovered in one step may be in another, with
    other places. Integers are recovered exactly, other numbers up to the rounding of the subtractions.
    Sources: LHC, arXiv:2402.07529, read in its authors' kernels, which also estimate what cannot be peeled (from the median
    of an element's three cells, with random signs); peeling and its threshold: arXiv:1101.2245.
    """

    def __init__(self, places: Tensor, num_cells: int):
        self.places, self.num_cells = places, num_cells
        self.index = places.nonzero().flatten()
        self.cells = self._cells_of(self.index)

    def _cells_of(self, index: Tensor) -> Tensor:
        """Return [3, m] the cells of the elements at `index` [m]."""
        per_row = self.num_cells // ROWS
        bits = pack_bits(self.places).long()
        salt = (
            int((bits * mix(0, torch.arange(len(bits), device=bits.device))).sum()) & LOW_32
        )  # a hash of the places
        rows = [mix(mix(salt, row), index) % per_row + row * per_row for row in range(ROWS)]
        return torch.stack(rows)

    def of(self, x: Tensor) -> Tensor:
        """Return the sums [cells] of a vector [n] that is zero outside the places."""
        sums = x.new_zeros(self.num_cells)
        return sums.index_add_(0, self.cells.flatten(), x[self.index].repeat(ROWS))

    @cached_property
    def _rounds(self) -> list[tuple[Tensor, Tensor]]:
        """Return for each round of peeling the elements that are alone in a cell, and such a cell for each."""
        counts = torch.bincount(self.cells.flatten(), minlength=self.num_cells)
        left = torch.arange(len(self.index), device=self.index.device)
        rounds: list[tuple[Tensor, Tensor]] = []
        while True:
            alone = counts[self.cells[:, left]] == 1
            is_found = alone.any(0)
            found, row = left[is_found], alone[:, is_found].int().argmax(0)
            if not len(found):
                return rounds
            rounds.append((found, self.cells[row, found]))
            left = left[~is_found]
            counts -= torch.bincount(self.cells[:, found].flatten(), minlength=self.num_cells)

    @cached_property
    def recovered(self) -> Tensor:
        """Return [n] bool, the elements that `recover` finds."""
        found = torch.zeros_like(self.places)
        for elements, _ in self._rounds:
            found[self.index[elements]] = True
        return found

    def recover(self, sums: Tensor) -> Tensor:
        """Return the vector [n] with these sums, with zeros where it cannot be recovered."""
        sums, x = sums.clone(), sums.new_zeros(len(self.places))
        for elements, cells in self._rounds:
            values = sums[cells]
            x[self.index[elements]] = values
            sums.index_add_(0, self.cells[:, elements].flatten(), -values.repeat(ROWS))
        return x
