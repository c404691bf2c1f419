"""Flash attention's forward and backward by torch's fused kernels: as in `flash.py`, for masks without documents.

A kernel supports only two masks: none, and the lower triangle. Where a sequence is cut into runs, the visible scores form a
few rectangles and triangles (`Mask.regions`). The kernel runs on each, and the results are merged by their log-sum-exps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.model.lse_merge import merge_
from minipar.model.mask import Mask, ScoreRegion

_aten = torch.ops.aten


def unsupported_reason(q: Tensor, mask: Mask) -> str | None:
    """Return why no kernel supports these inputs, or None where one does."""
    if mask.positions is not None:
        return "documents"
    if mask.causal and len({run.step for run in (*mask.queries, *mask.keys)}) > 1:
        return "runs of different steps"
    if q.device.type == "cpu":
        return None
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8:
        return f"{str(q.dtype).removeprefix('torch.')} of head_dim={q.shape[-1]} on {q.device.type}"
    return None


def forward_(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
    """Merge attention over the keys of k into (out, lse), in place."""
    for part in mask.regions():
        heads = _GroupedQueryLayout(q, k, part)
        part_out, part_lse = _kernel(heads.fold(q), heads.keys(k), heads.keys(v), part.is_causal)
        merge_(heads.place(out), heads.place(lse), heads.unfold(part_out), heads.unfold(part_lse))


def backward_(dq, dk, dv, q, k, v, out, lse, dout, mask: Mask) -> None:
    """Add the gradients from this block of keys to dq, dk and dv; out and lse are those over all keys."""
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
        grads = _kernel_backward(*folded, part.is_causal)
        heads.place(dq).add_(heads.unfold(grads[0]))
        dk[:, :, part.cols] += heads.sum_key_grads(grads[1])
        dv[:, :, part.cols] += heads.sum_key_grads(grads[2])


class _GroupedQueryLayout:
    """Layout of [B, H/g, ...] keys and [B, H, ...] queries for a kernel that needs as many key heads as query heads.

    rectangle  all queries see the same keys: fold the g query heads into the positions, [B, H/g, g * R, ...]
    triangle   each position sees other keys: repeat the keys for each query head
    """

    def __init__(self, q: Tensor, k: Tensor, part: ScoreRegion):
        self.part, self.group = part, q.shape[1] // k.shape[1]
        self.folds = self.group > 1 and not part.is_causal

    def place(self, x: Tensor) -> Tensor:
        """Return the region's rows of x [B, H, T, ...], a view in the shape that `unfold` returns."""
        rows = x[:, :, self.part.rows]
        return rows.unflatten(1, (-1, self.group)) if self.folds else rows

    def fold(self, x: Tensor) -> Tensor:
        return self.place(x).flatten(2, 3) if self.folds else self.place(x)

    def unfold(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.group, -1)) if self.folds else x

    def keys(self, x: Tensor) -> Tensor:
        cols = x[:, :, self.part.cols]
        return cols if self.folds or self.group == 1 else cols.repeat_interleave(self.group, dim=1)

    def sum_key_grads(self, grad: Tensor) -> Tensor:
        return grad if self.folds or self.group == 1 else grad.unflatten(1, (-1, self.group)).sum(2)


def _kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]


def _kernel_backward(dout, q, k, v, out, lse, is_causal: bool):
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, is_causal
        )
    unused_rng = torch.zeros((), dtype=torch.int64, device=q.device)  # unused dropout RNG state
    return _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, unused_rng, unused_rng
    )
