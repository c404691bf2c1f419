"""The two halves of flash attention by torch's fused kernels: the functions of `flash.py`, for masks without documents.

A kernel knows two masks, none and the lower triangle. What is seen of a sequence cut into runs comes down to a few
rectangles and triangles (`Mask.parts`), so it is called on these, and its results are merged by their log-sum-exps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.model.mask import Mask
from minipar.model.merge import merge_

_aten = torch.ops.aten


def obstacle(q: Tensor, mask: Mask) -> str | None:
    """Why this cannot be left to a kernel; None where it can."""
    if mask.positions is not None:
        return "documents"
    if mask.causal and len({run.step for run in (*mask.queries, *mask.keys)}) > 1:
        return "runs of different steps"
    if q.device.type == "cpu":
        return None
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8:
        return f"{str(q.dtype).removeprefix('torch.')} of head_dim={q.shape[-1]} on {q.device.type}"
    return None


def attend_(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
    """Take the keys of k into (out, lse), in place."""
    for part in mask.parts():
        keys, values = (_for_every_query_head(x[:, :, part.cols], q) for x in (k, v))
        part_out, part_lse = _kernel(q[:, :, part.rows], keys, values, part.triangle)
        merge_(out[:, :, part.rows], lse[:, :, part.rows], part_out, part_lse)


def attend_backward_(dq, dk, dv, q, k, v, out, lse, dout, mask: Mask) -> None:
    """Add the gradients of this block to dq, dk and dv; out and lse are those over all keys."""
    for part in mask.parts():
        rows, cols = part.rows, part.cols
        keys, values = (_for_every_query_head(x[:, :, cols], q) for x in (k, v))
        grads = _kernel_backward(
            dout[:, :, rows], q[:, :, rows], keys, values, out[:, :, rows], lse[:, :, rows], part.triangle
        )
        dq[:, :, rows] += grads[0]
        dk[:, :, cols] += _of_key_heads(grads[1], k)
        dv[:, :, cols] += _of_key_heads(grads[2], k)


def _kernel(q: Tensor, k: Tensor, v: Tensor, triangle: bool) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, triangle)
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, triangle)[:2]


def _kernel_backward(dout, q, k, v, out, lse, triangle: bool):
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, triangle
        )
    no_draw = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a dropout that there is not
    return _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, triangle, no_draw, no_draw
    )


def _for_every_query_head(x: Tensor, q: Tensor) -> Tensor:
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _of_key_heads(grad: Tensor, k: Tensor) -> Tensor:
    group = grad.shape[1] // k.shape[1]
    return grad if group == 1 else grad.unflatten(1, (-1, group)).sum(2)
