"""Faulty versions of functions and classes of `minipar.simple`: planted faults, and snippets found in tutorials."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minipar.simple import autograd, collectives, generate, moe, pipeline, ring_attention, vocab, zero


class HookDDP(nn.Module):
    """Data parallelism by a hook on each parameter. Subclasses define the hook `on_gradient` as tutorials write it."""

    def __init__(self, module, comm, bucket_mb=25.0):
        super().__init__()
        self.module, self.comm = module, comm
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.data.copy_(comm.broadcast(tensor.data))
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self.on_gradient)

    def forward(self, x):
        return self.module(x)


class WaitsInTheHook(HookDDP):
    def on_gradient(self, param):
        param.grad = self.comm.all_reduce(param.grad, "mean", async_op=True).wait()


class SumsAndNeverDivides(HookDDP):
    def on_gradient(self, param):
        param.grad = self.comm.all_reduce(param.grad)


class ReducesACopy(HookDDP):
    def on_gradient(self, param):
        flat = torch.cat([param.grad.flatten()])
        self.comm.all_reduce_(flat, "mean")  # the mean is never written back to the gradients


class AveragesTheParameter(HookDDP):
    """The hook gets the parameter, not its gradient, and averages the parameter."""

    def on_gradient(self, param):
        param.data.copy_(self.comm.all_reduce(param.data, "mean"))


class LastBucketStays(HookDDP):
    """Buckets are reduced when they are full. The last bucket is never full, so it is never reduced."""

    def __init__(self, module, comm, bucket_mb=25.0):
        super().__init__(module, comm)
        self.limit, self.bucket = bucket_mb * 2**20, []

    def on_gradient(self, param):
        self.bucket.append(param)
        if sum(p.grad.nbytes for p in self.bucket) >= self.limit:
            for p in self.bucket:
                p.grad = self.comm.all_reduce(p.grad, "mean")
            self.bucket.clear()


class GathersGradients(zero.Zero1):
    """'ZeRO' by an all-gather of full gradients before the update: right results, but each rank keeps the full state."""

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
    """A ring reduce-scatter that stops after p-2 steps, one too few: each rank returns its own chunk, not the sum."""
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
    """A cross-entropy that takes exp of the logits without subtracting their maximum."""

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
    """Each rank attends to every block of keys separately, and takes the mean of the results."""
    (k, v), heads = (autograd.gather_tokens(comm, x.transpose(1, 2).flatten(2)) for x in (k, v)), q.shape[1]
    blocks = [x.unflatten(2, (heads, -1)).transpose(1, 2).chunk(comm.size, 2) for x in (k, v)]
    scores = [ring_attention.scores_of(comm, q, key, source, causal) for source, key in enumerate(blocks[0])]
    outs = [s.softmax(-1).nan_to_num() @ value for s, value in zip(scores, blocks[1])]
    return torch.stack(outs).mean(0)


class KeepsRejectedGuesses(generate.Cache):
    """The keys and values of rejected guesses stay in the cache."""

    def cut(self, length):
        pass


def drawn_from_p_after_a_rejection(p, guesses, dice):
    """After a rejection the token is drawn from the model's distribution, as if nothing had been guessed."""
    written = []
    for i, (token, q) in enumerate(guesses):
        if not dice.accepts(i, min(1.0, (p[i][token] / q[token]).item())):
            return [*written, dice.draw(i, p[i])]
        written.append(token)
    return [*written, dice.draw(len(guesses), p[len(guesses)])]
