"""The ring attention under torch's context_parallel, by its two private functions.

context_parallel itself dispatches to it from the GPU's attention kernels alone; here it gets the CPU's kernel. Its default
layout (load balance) cuts the sequence otherwise than in contiguous pieces, and its default sums are in float32.
"""

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, group):
        options = context_parallel._cp_options
        options.enable_load_balance, options.convert_to_f32 = False, q.dtype != torch.float64
        context_parallel.set_rotate_method("alltoall")
        ctx.causal, ctx.group = causal, group
        out, lse, *_ = context_parallel._templated_ring_attention(group, 2, KERNEL, q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv, *_ = context_parallel._templated_ring_attention_backward(
            ctx.group, 2, BACKWARD, dout, "grad_out", q, k, v, out, lse, ctx.causal, dropout_p=0.0
        )
        return dq, dk, dv, None, None


def ring_attention(comm, q, k, v, causal=True):
    return Ring.apply(*(x.contiguous() for x in (q, k, v)), causal, comm.process_group())
