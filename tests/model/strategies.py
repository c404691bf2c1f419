"""Shapes of queries, keys and values, and tensors of such shapes: what the tests of attention draw."""

import torch
from hypothesis import strategies as st


def draw_qkv(seed, B, H, group, T, d, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, T, H, d), (B, T, H // group, d), (B, T, H // group, d)
    # transposed views, as the model hands them over
    return [torch.randn(s, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for s in shapes]


sizes = st.tuples(
    st.integers(1, 2), st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]), st.integers(1, 9), st.integers(1, 5)
)
