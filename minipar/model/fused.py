"""`forward_` and `backward_` of `flash.py` by torch's fused kernels, for masks without documents.

A kernel can mask nothing, or everything above the diagonal. If a sequence is cut into runs, the visible scores form a few
rectangles and triangles (`Mask.regions`). The kernel runs on each, and the results are merged by their log-sum-exps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.model.lse_merge import merge_
from minipar.model.mask import Mask, ScoreRegion

_aten = torch.ops.aten
# With fewer keys than its vectors have elements (8 to 32), the CPU kernel returns 0 where all scores are nan.
FEW_KEYS = 32


def unsupported_reason(q: Tensor, mask: Mask) -> str | None:
    """Return the reason why no kernel supports these inputs; None if a kernel does."""
    if mask.positions is not None:
        return "documents"
    if mask.causal and len({run.step for run in (*mask.queries, *mask.keys)}) > 1:
        return "runs of different steps"
    if q.device.type == "cuda" and (q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8):
        return f"{str(q.dtype).removeprefix('torch.')} of head_dim={q.shape[-1]} on cuda"
    return None


def forward_(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
    """Merge attention over the keys of k into (out, lse), in place."""
    for part in mask.regions():
        heads = _GroupedQueryLayout(q, k, part)
        part_out, part_lse = _kernel(heads.fold(q), heads.keys(k), heads.keys(v), part.is_causal)
        merge_(heads.place(out), heads.place(lse), heads.unfold(part_out), heads.unfold(part_lse))


def backward_(
    dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, dout: Tensor, mask: Mask,
) -> None:  # fmt: skip
    """Add the gradients from this block of keys to dq, dk and dv; `out` and `lse` are the results over all keys."""
    for part in mask.regions():
        heads = _GroupedQueryLayout(q, k, part)
        folded = (
            heads.fold(dout),
            heads.fold(q),
            heads.keys(k),
            heads.keys(v),
            heads.fold(out),
            heads.fold(lse),
        )
        part_dq, part_dk, part_dv = _kernel_backward(*folded, part.is_causal)
        heads.place(dq).add_(heads.unfold(part_dq))
        dk[:, :, part.cols] += heads.sum_key_grads(part_dk)
        dv[:, :, part.cols] += heads.sum_key_grads(part_dv)


class _GroupedQueryLayout:
    """Layout of [B, H/g, ...] keys and [B, H, ...] queries for a kernel that needs as many key heads as query heads.

    rectangle  all queries see the same keys: fold the g query heads into the positions, [B, H/g, g * R, ...]
    triangle   each position sees different keys: repeat the keys for each query head
    """

    def __init__(self, q: Tensor, k: Tensor, part: ScoreRegion):
        self.part, self.group = part, q.shape[1] // k.shape[1]
        self.folds = self.group > 1 and not part.is_causal

    def place(self, x: Tensor) -> Tensor:
        """Return the region's rows of x [B, H, T, ...], a view in the shape that `unfold` returns."""
        rows = x[:, :, self.part.rows]
        return torch.unflatten(rows, 1, (-1, self.group)) if self.folds else rows

    def fold(self, x: Tensor) -> Tensor:
        return self.place(x).flatten(2, 3) if self.folds else self.place(x)

    def unfold(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, 2, (self.group, -1)) if self.folds else x

    def keys(self, x: Tensor) -> Tensor:
        cols = x[:, :, self.part.cols]
        return cols if self.folds or self.group == 1 else cols.repeat_interleave(self.group, dim=1)

    def sum_key_grads(self, grad: Tensor) -> Tensor:
        return grad if self.folds or self.group == 1 else torch.unflatten(grad, 1, (-1, self.group)).sum(2)


def _dense_features(x: Tensor) -> Tensor:
    """Return x, copied if its features are not adjacent in memory, which the kernels assume without a check."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = map(_dense_features, (q, k, v))
    if q.device.type != "cuda":
        if q.device.type == "cpu" and k.shape[2] < FEW_KEYS and (q.isnan().any() or k.isnan().any()):
            return _with_nan(q, k, v, is_causal)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    else:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    return out, lse


def _with_nan(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Compute the result of a kernel without it, in float32 or wider; nans are kept."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(2, 3) * q.shape[3] ** -0.5
    if is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(3)
    return ((scores - lse[..., None]).exp() @ v.to(wide)).to(q.dtype), lse


def _kernel_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = map(_dense_features, (dout, q, k, v, out))
    if q.device.type != "cuda":
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, is_causal
        )
        return dq, dk, dv
    lse = lse.contiguous()  # of which this kernel asks no strides
    no_rng = torch.zeros((), dtype=torch.int64, device=q.device)  # random state of unused dropout
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, no_rng, no_rng
    )
    return dq, dk, dv
