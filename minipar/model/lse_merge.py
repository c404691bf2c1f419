"""Merge attention results over separate parts of the keys, by the log-sum-exps of the scores.

Let s be the scores of one query. A softmax over a part of the keys differs from the softmax over all keys only by a
factor, which the log-sum-exp of the part's scores determines:

    part p      lse_p = log sum_{j in p} exp s_j        out_p = sum_{j in p} exp(s_j - lse_p) v_j
    together    lse = log(exp lse_a + exp lse_b)        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The weights are non-negative and sum to 1, so nothing overflows whatever the scores. A query that sees no key of a
part has lse_p = -inf and out_p = 0 there, and the part has weight 0.

Source: FlashAttention, arXiv:2205.14135, section 3.1; Milakov and Gimelshein, arXiv:1805.02867.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge one more part into (out, lse), in place.

    out, part_out  [B, H, T, head_dim]    lse, part_lse  [B, H, T]

    The part's weight, exp(part_lse) / (exp(lse) + exp(part_lse)), is sigmoid(part_lse - lse).
    """
    weight = torch.sigmoid(part_lse - lse)
    weight.masked_fill_(part_lse == -torch.inf, 0.0)  # no key in the part; -inf - (-inf) would be nan
    out.lerp_(part_out.to(out.dtype), weight[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


def empty_attention(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention over no keys, in float32 or wider: the initial value for `merge_`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros_like(q, dtype=dtype), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
