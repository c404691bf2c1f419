"""FSDP (ZeRO-3): each of p ranks keeps a p-th part of every parameter, gradient and optimizer state.

A unit is a submodule whose parameters w are all-gathered together, and are unsharded only while the unit runs:

    before a unit's forward    w = all_gather(shard)                        sends (p-1)/p of the unit's elements
    after its forward          free w
    before its backward        w = all_gather(shard)                        sends (p-1)/p
    after its backward         shard.grad = 1/p * reduce_scatter(w.grad)    sends (p-1)/p; then free w and w.grad

    forward   [1 whole] [2 whole] [3 whole]     backward   [3 whole] [2 whole] [1 whole]     never two units at once

A rank sends 3 (p-1)/p of the parameters per step; DDP sends 2 (p-1)/p. Between steps it holds, with Adam in float32, 16/p
bytes per parameter; DDP holds 16. Autograd saves views of w for the backward, so w stays the same tensor: only its storage
is freed and allocated again. Every parameter of a unit must get a gradient: if one gets none, its unit is never reduced.

In the library: minipar.FSDP adds prefetch, parameters outside units, nested units, unused, frozen, tied parameters, mixed
precision, hybrid sharding, recomputation. Source: ZeRO, arXiv:1910.02054, section 5.3; PyTorch FSDP, arXiv:2304.11277.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Unit:
    """A unit: `whole`, one flat buffer of its parameters, without memory while freed; `shard`, this rank's part of it."""

    def __init__(self, module, comm):
        self.comm, self.params = comm, list(module.parameters())
        flat = torch.cat([p.data.flatten() for p in self.params])
        flat = comm.broadcast(F.pad(flat, (0, -len(flat) % comm.size)))
        self.shard = nn.Parameter(flat.chunk(comm.size)[comm.rank].clone())
        self.whole, sizes = torch.empty_like(flat), [p.numel() for p in self.params]
        for p, part in zip(self.params, self.whole[: sum(sizes)].split(sizes)):
            # p shares the storage but not the version counter: to autograd, refilling `whole` does not change p.
            p.data = part.view_as(p)
            p.register_post_accumulate_grad_hook(self.gradient_is_ready)
        self.free()
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(lambda module, inputs, output: self.after_forward(output))

    @torch.no_grad()
    def gather(self):
        # The parameters are views of `whole`: resizing its storage gives them memory again, and `free` takes it away.
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.whole.copy_(self.comm.all_gather(self.shard.data))

    def after_forward(self, output):
        if not isinstance(output, torch.Tensor):
            raise ValueError("a unit returns one tensor here; minipar.FSDP knows of tuples and more")
        if output.requires_grad:
            # Autograd calls this when the output's gradient is known, just before the unit's own backward.
            output.register_hook(lambda _: self.gather())
        self.free()

    def free(self):
        self.whole.untyped_storage().resize_(0)

    @torch.no_grad()
    def gradient_is_ready(self, param):
        if any(p.grad is None for p in self.params):
            return  # this was not the unit's last gradient
        flat = torch.cat([p.grad.flatten() for p in self.params])
        part = self.comm.reduce_scatter(F.pad(flat, (0, len(self.whole) - len(flat))), "mean")
        self.shard.grad = part if self.shard.grad is None else self.shard.grad + part
        for p in self.params:
            p.grad = None
        self.free()


class FSDP(nn.Module):
    """Make each submodule of class `unit_class` a unit. `parameters()` yields the units' shards, for the optimizer."""

    def __init__(self, module, comm, unit_class):
        super().__init__()
        units = [m for m in module.modules() if isinstance(m, unit_class)]
        params = [p for m in units for p in m.parameters()]
        if set(params) != set(module.parameters()) or len(set(params)) < len(params):
            raise ValueError(f"each parameter must be in exactly one {unit_class.__name__}; use minipar.FSDP")
        self.module = module
        self.units = [Unit(m, comm) for m in units]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def parameters(self, recurse=True):
        """Yield this rank's shards. The module's own parameters are empty between units: no optimizer may have them."""
        return iter([unit.shard for unit in self.units])
