"""FSDP, or ZeRO-3: a rank keeps a p-th part of every parameter, gradient and state. Units are whole only while they run.

    before a unit's forward    w = all_gather(shard)                        (p-1)/p of it sent
    after it                   free w
    before its backward        w = all_gather(shard) once more              (p-1)/p
    after it                   shard.grad = 1/p * reduce_scatter(w.grad)    (p-1)/p, and free w and w.grad

In all 3P elements a step where DDP sends 2P; and 16/p bytes per parameter between steps, in place of 16.
Autograd keeps views of w for the backward. So w stays the same tensor for good, and only its memory comes and goes.

The library's: minipar.FSDP, plus prefetch, parameters outside units, units inside units, unused, frozen and tied
parameters, mixed precision, hybrid sharding, recomputation.
Source: ZeRO, arXiv:1910.02054, section 5.3; PyTorch FSDP, arXiv:2304.11277.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Unit:
    """The parameters of one module: `shard`, this rank's part of them all, and `whole`, without memory while it rests."""

    def __init__(self, module, comm):
        self.comm, self.params = comm, list(module.parameters())
        flat = torch.cat([p.data.flatten() for p in self.params])
        flat = comm.broadcast(F.pad(flat, (0, -len(flat) % comm.size)))
        self.shard = nn.Parameter(flat.chunk(comm.size)[comm.rank].clone())
        self.whole, start = torch.empty_like(flat), 0
        for p in self.params:
            p.data = self.whole[start : start + p.numel()].view_as(p)
            start += p.numel()
            p.register_post_accumulate_grad_hook(self.gradient_is_ready)
        self.free()
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(lambda module, inputs, output: self.after_forward(output))

    @torch.no_grad()
    def gather(self):
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.whole.copy_(self.comm.all_gather(self.shard.data))

    def after_forward(self, output):
        if output.requires_grad:  # its gradient is there when the unit's backward begins
            output.register_hook(lambda _: self.gather())
        self.free()

    def free(self):
        self.whole.untyped_storage().resize_(0)

    @torch.no_grad()
    def gradient_is_ready(self, param):
        if any(p.grad is None for p in self.params):
            return
        flat = torch.cat([p.grad.flatten() for p in self.params])
        part = self.comm.reduce_scatter(F.pad(flat, (0, len(self.whole) - len(flat))), "mean")
        self.shard.grad = part if self.shard.grad is None else self.shard.grad + part
        for p in self.params:
            p.grad = None
        self.free()


class FSDP(nn.Module):
    """`module`, each module of class `unit_class` inside it a unit. `parameters()` are the shards, for the optimizer."""

    def __init__(self, module, comm, unit_class):
        super().__init__()
        units = [m for m in module.modules() if isinstance(m, unit_class)]
        counts = [p for m in units for p in m.parameters()]
        if set(counts) != set(module.parameters()) or len(set(counts)) < len(counts):
            raise ValueError(f"each parameter must be in exactly one {unit_class.__name__}; use minipar.FSDP")
        self.units = [Unit(m, comm) for m in units]
        self.shards = nn.ParameterList(unit.shard for unit in self.units)
        # Not `self.module = module`: a child's parameters would be among ours.
        self.forward = lambda *args, **kwargs: module(*args, **kwargs)
