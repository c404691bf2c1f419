"""A batch's units: microbatches, each cut into slices of tokens."""

import pytest
import torch

from minipar.pipeline.batch import split_units


def test_units_are_the_slices_of_each_microbatch_in_order():
    x = torch.arange(2 * 5 * 2).view(2, 5, 2)
    equal = split_units("x", x, m=2, slices=2, sizes=None)
    given = split_units("x", x, m=1, slices=2, sizes=[1, 4])
    assert [unit.tolist() for unit in equal] == [
        x[i : i + 1, a:b].tolist() for i in (0, 1) for a, b in ((0, 3), (3, 5))
    ]
    assert [unit.tolist() for unit in given] == [x[:, :1].tolist(), x[:, 1:].tolist()]


def test_sizes_that_do_not_cut_the_tokens_are_refused():
    with pytest.raises(ValueError, match=r"slice_sizes=\[1, 3\] does not cut dim 1 of length 5 into 2 parts"):
        split_units("x", torch.zeros(2, 5), m=1, slices=2, sizes=[1, 3])
    with pytest.raises(ValueError, match=r"slices=6 are more than x.shape\[1\]=5 tokens"):
        split_units("x", torch.zeros(2, 5), m=1, slices=6, sizes=None)
