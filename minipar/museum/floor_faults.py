"""Faults in the smallest versions, and snippets as tutorials have them: wrong versions of parts of `minipar.simple`."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from minipar.simple import autograd, collectives, moe, pipeline, ring_attention, vocab, zero


class HookDDP(nn.Module):
    """Data parallelism by a hook on each parameter; `on_gradient(comm, param)` is what a tutorial writes there."""

    def __init__(self, module, comm, bucket_mb=25.0, on_gradient=None):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.data.copy_(comm.broadcast(tensor.data))
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(partial(on_gradient, comm))

    def forward(self, x):
        return self.module(x)


def waits_in_the_hook(comm, param):
    param.grad = comm.all_reduce(param.grad, "mean", async_op=True).wait()


def sums_and_never_divides(comm, param):
    param.grad = comm.all_reduce(param.grad)


def reduces_a_copy(comm, param):
    flat = torch.cat([param.grad.flatten()])
    comm.all_reduce_(flat, "mean")  # never written back


def averages_the_parameter(comm, param):
    param.data.copy_(comm.all_reduce(param.data, "mean"))  # the hook is given the parameter, not its gradient


class LastBucketStays(nn.Module):
    """Buckets are reduced when they are full. The last one never is."""

    def __init__(self, module, comm, bucket_mb=25.0):
        super().__init__()
        self.module, self.comm, self.limit, self.bucket = module, comm, bucket_mb * 2**20, []
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.data.copy_(comm.broadcast(tensor.data))
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self.collect)

    def forward(self, x):
        return self.module(x)

    def collect(self, param):
        self.bucket.append(param)
        if sum(p.grad.nbytes for p in self.bucket) >= self.limit:
            for p in self.bucket:
                p.grad = self.comm.all_reduce(p.grad, "mean")
            self.bucket.clear()


class GathersGradients(zero.Zero1):
    """'ZeRO' as an all-gather of whole gradients before the update: right numbers, and every rank keeps all the state."""

    def __init__(self, params, optimizer_cls, comm, **options):
        super().__init__(params, optimizer_cls, comm, **options)
        self.whole = optimizer_cls(self.params, **options)

    def step(self):
        for param in self.params:
            param.grad = self.comm.all_gather(param.grad[None]).mean(0)
        self.whole.step()


def sends_right_receives_left(comm, chunk):
    """All-gather by a blocking send to the right, then a receive from the left."""
    p, rank = comm.size, comm.rank
    chunks = [chunk] * p
    for step in range(p - 1):
        comm.send(chunks[(rank - step) % p], (rank + 1) % p)
        chunks[(rank - step - 1) % p] = comm.recv(chunk.shape, chunk.dtype, (rank - 1) % p)
    return torch.cat(chunks)


def one_step_too_few(comm, x):
    """A ring reduce-scatter with p-2 steps: off by one, and right on two ranks of a different kind of test."""
    p, rank = comm.size, comm.rank
    chunks = [chunk.clone() for chunk in collectives.cut(x, p)]
    for step in range(1, p - 1):
        like = chunks[(rank - step - 1) % p]
        like += comm.exchange(chunks[(rank - step) % p], (rank + 1) % p, like.shape, x.dtype, (rank - 1) % p)
    return chunks[rank]


def adds_different_features(comm, x, gate, up, down):
    """A column-parallel layer that all-reduces its outputs, which are different features on each rank."""
    x = autograd.copy(comm, x)
    hidden = autograd.all_reduce(comm, F.silu(x @ gate.t()) * (x @ up.t()))
    return autograd.all_reduce(comm, hidden @ down.t())


def loss_without_the_maximum(comm, logits, targets):
    """exp of the logits as they are."""

    class NoMaximum:
        size, rank = comm.size, comm.rank

        @staticmethod
        def all_reduce(x, op="sum"):
            return torch.zeros_like(x) if op == "max" else comm.all_reduce(x)

    return vocab.cross_entropy(NoMaximum, logits, targets)


def does_not_divide_by_m(comm, module, loss_fn, *rest):
    m = rest[2]
    return pipeline.gpipe(comm, module, lambda y, target: m * loss_fn(y, target), *rest)


def capacity_of_the_whole_batch(comm, x, *rest):
    B, T, D = x.shape
    y, *losses = moe.switch(comm, x.reshape(1, B * T, D), *rest)
    return y.view(B, T, D), *losses


def weight_left_out(comm, x, router, *rest):
    """The chosen expert's output is not multiplied by its probability: the router gets no gradient from the loss."""
    y, *losses = moe.switch(comm, x, router, *rest)
    return y / (x @ router.t()).softmax(-1).amax(-1, keepdim=True).detach(), *losses


def parts_averaged(comm, q, k, v, causal=True):
    """Each rank attends to every block of keys, and takes the mean of the results."""
    (k, v), heads = (autograd.gather_tokens(comm, x.transpose(1, 2).flatten(2)) for x in (k, v)), q.shape[1]
    blocks = [x.unflatten(2, (heads, -1)).transpose(1, 2).chunk(comm.size, 2) for x in (k, v)]
    scores = [ring_attention._scores(comm, q, key, source, causal) for source, key in enumerate(blocks[0])]
    outs = [s.softmax(-1).nan_to_num() @ value for s, value in zip(scores, blocks[1])]
    return torch.stack(outs).mean(0)
