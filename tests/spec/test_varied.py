"""Varied inputs: infinities beside nan, and no more rounding than their dtype's."""

import pytest
import torch

from minipar.spec.collectives import varied_calls
from minipar.spec.varied import BFLOAT16, FLOAT32, PLAIN


def test_one_rank_has_nan_and_another_infinity():
    (call,) = [call for call in varied_calls("all_reduce", 3) if call.values == "not finite"]
    first, _, last = call.inputs(3)
    assert first.isnan().any()
    assert last.isinf().any()


@pytest.mark.parametrize(
    ("kind", "allowed"), [(PLAIN, 1e-10), (FLOAT32, 1e-4), (BFLOAT16, 0.1)], ids=["64", "32", "16 bits"]
)
def test_rounding_is_allowed_for_the_largest_entry_and_no_more(kind, allowed):
    x = torch.tensor([1.0, 4.0], dtype=torch.float64)
    for times, right in ((0.7, True), (1.5, False)):
        off = x + torch.tensor([times * allowed * 4.0, 0.0], dtype=torch.float64)
        assert (kind.mismatch("x", off.to(kind.dtype), x) is None) == right
