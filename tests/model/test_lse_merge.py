"""Attention over parts of the keys, merged, is attention over all of them, however large the scores."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.model.lse_merge import empty_attention, merge_
from tests.strategies import assert_equal_to, seeds, splits


def part_of_attention(scores, v):
    """(out, lse) over these keys alone; 0 and -inf where there are none."""
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@given(
    data=st.data(),
    seed=seeds,
    size=st.sampled_from([1.0, 1e3]),  # exp(1e3) is beyond float64, exp(-1e3) below
    shift=st.sampled_from([-1e4, 0.0, 1e4]),
)
def test_parts_merge_into_the_whole_whatever_the_size_of_the_scores(data, seed, size, shift):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, 2, 3, 8, generator=generator, dtype=torch.float64) * size + shift
    v = torch.randn(1, 2, 8, 4, generator=generator, dtype=torch.float64)
    out, lse = empty_attention(torch.empty(1, 2, 3, 4, dtype=torch.float64))
    sizes = data.draw(splits(8, 3))
    for part_scores, part_v in zip(scores.split(sizes, -1), v.split(sizes, -2)):
        merge_(out, lse, *part_of_attention(part_scores, part_v))
    want_out, want_lse = part_of_attention(scores, v)
    assert_equal_to(out, want_out)
    assert_equal_to(lse, want_lse)


def test_a_part_without_keys_changes_nothing():
    out, lse = empty_attention(torch.empty(1, 1, 2, 3))
    merge_(out, lse, *empty_attention(torch.empty(1, 1, 2, 3)))
    assert not out.any()
    assert lse.eq(-torch.inf).all()
