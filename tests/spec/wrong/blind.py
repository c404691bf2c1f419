"""Mistakes that show in a second call, another group, what the caller keeps, or between steps: patches of right ones."""

from functools import partial

import torch
from torch import nn
from torch.autograd import Function

from minipar.comm import halving_doubling
from minipar.simple import (
    autograd,
    collectives,
    ddp,
    dispatch,
    fsdp,
    global_loss,
    grad_norm,
    pipeline,
    reshard,
    ring_attention,
    sequence_parallel,
    tensor_parallel,
    ulysses,
    vocab,
    zero,
)
from tests.spec.wrong.generic import Replaced, returned


def latest(right):
    """The backward is of the tensors of the latest call."""
    kept = {}

    class Latest(Function):
        @staticmethod
        def forward(ctx, comm, options, *args):
            kept["args"] = args
            ctx.comm, ctx.options = comm, options
            return right(comm, *args, **options)

        @staticmethod
        def backward(ctx, dy):
            args = [x.detach().requires_grad_() if x.is_floating_point() else x for x in kept["args"]]
            with torch.enable_grad():
                right(ctx.comm, *args, **ctx.options).backward(dy)
            return None, None, *(x.grad for x in args)

    return lambda comm, *args, **options: Latest.apply(comm, options, *args)


def first_group(right):
    """The rank and size are those of the first group."""
    kept = []

    def wrong(comm, *args, **options):
        kept.append((comm.rank, comm.size))
        rank, size = kept[0]
        return right(Replaced(comm, rank=rank, size=size), *args, **options)

    return wrong


class ZeroesDy(Function):
    """The identity, whose backward leaves zeros in the gradient that came in."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        dx = dy.clone()
        dy.zero_()
        return dx


def writes(place, change):
    """An argument is written to after it was used."""

    def mistake(right):
        def wrong(comm, *args, **options):
            y = right(comm, *args, **options)
            change(args[place])
            return y

        return wrong

    return mistake


def halved(right):
    """Numbers of rows and tokens travel in float16."""

    def wrong(comm, *args):
        def half(collective):
            return lambda x: x if x.is_floating_point() else collective(x.half()).long()

        there = Replaced(comm, all_gather=half(comm.all_gather), all_reduce=half(comm.all_reduce))
        return right(there, *args)

    return wrong


def full_by_default(comm, q, k, v, causal=False):
    return ring_attention.ring_attention(comm, q, k, v, causal=causal)


def returns_early(comm, logits, targets):
    if not (targets != -100).any():
        return logits.sum() * 0
    return global_loss.global_loss(comm, logits, targets)


class OfTheClass(ddp.DDP):
    """Buckets are the class's."""

    @property
    def groups(self):
        return OfTheClass.kept

    @groups.setter
    def groups(self, groups):
        OfTheClass.kept = groups


class LargestFirst(ddp.DDP):
    """A bucket starts when its gradients are there, in no order."""

    def _gradient_is_ready(self, param):
        bucket = next(b for b in self.buckets if any(p is param for p in b.params))
        self.buckets.remove(bucket)
        self.buckets.insert(0, bucket)
        super()._gradient_is_ready(param)


def frozen_as_they_are(module, comm, bucket_mb=25.0):
    """Frozen parameters are not broadcast."""
    frozen = [p for p in module.parameters() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    mine = [p.detach().clone() for p in frozen]
    for p, x in zip(frozen, mine):
        p.data.copy_(x)
    hidden = [
        (m, name, p)
        for m in module.modules()
        for name, p in m._parameters.items()
        if any(p is f for f in frozen)
    ]
    for m, name, _ in hidden:
        m._parameters[name] = None
    wrapped = ddp.DDP(module, comm, bucket_mb)
    for m, name, p in hidden:
        m._parameters[name] = p.requires_grad_(False)
    return wrapped


def average_of_each_layer(module, comm):
    """A tied weight is averaged with each of its layers."""
    for layer in module.modules():
        for p in layer.parameters(recurse=False):
            p.grad = comm.all_reduce(p.grad, "mean")


class TwoOptions(zero.Zero1):
    def __init__(self, params, optimizer_cls, comm, lr, weight_decay=0.0, **others):
        super().__init__(params, optimizer_cls, comm, lr=lr, weight_decay=weight_decay)


class ShardsOfTheClass(zero.Zero1):
    @property
    def shards(self):
        return ShardsOfTheClass.kept

    @shards.setter
    def shards(self, shards):
        ShardsOfTheClass.kept = shards


class FirstGradientIsEnough(fsdp.Unit):
    """A unit is reduced when its first parameter's gradient is there."""

    def gradient_is_ready(self, param):
        if param is not self.params[0]:
            return
        for p in self.params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        super().gradient_is_ready(param)


class FirstGradientFSDP(fsdp.FSDP):
    def __init__(self, module, comm, unit_class):
        nn.Module.__init__(self)
        self.module = module
        self.units = [FirstGradientIsEnough(m, comm) for m in module.modules() if isinstance(m, unit_class)]


class WholeAfterEvaluation(fsdp.FSDP):
    """Units that were gathered without a backward are not gathered again."""

    def __init__(self, module, comm, unit_class):
        super().__init__(module, comm, unit_class)
        for unit in self.units:
            unit.free, unit.gather = self.kept(unit, unit.free, unit.gather)

    def kept(self, unit, free, gather):
        state = {"whole": False}

        def free_or_keep():
            state["whole"] = not torch.is_grad_enabled() or state["whole"]
            if not state["whole"]:
                free()

        return free_or_keep, lambda: None if state["whole"] else gather()


def steps(order, stage=pipeline.Stage):
    """A pipeline's step that runs the actions of `order(p, rank, m)`: forwards k, and backwards -1 - k."""

    def step(comm, module, loss_fn, inputs, targets, m, shape, dtype):
        run = stage(comm, module, pipeline.mean_of(loss_fn, m), shape, dtype)
        xs, ts = pipeline.microbatches(inputs, m), pipeline.microbatches(targets, m)
        for k in order(comm.size, comm.rank, m):
            if k >= 0:
                run.forward(k, xs[k], ts[k])
            else:
                run.backward(-1 - k)
        return run.end()

    return step


def one_after_another(p, rank, m):
    return [k for i in range(m) for k in (i, -1 - i)]


def one_f_one_b(p, rank, m):
    first = min(p - rank, m)
    rest = [k for i in range(m - first) for k in (-1 - i, first + i)]
    return [*range(first), *rest, *(-1 - i for i in range(m - first, m))]


class KeepsGraphs(pipeline.Stage):
    def backward(self, k):
        x, y = self.kept[k]
        dy = None if self.last else self.gradients.recv(y.shape, y.dtype, self.comm.rank + 1)
        torch.autograd.backward(y, dy, retain_graph=True)
        if not self.first:
            self.sent.append(self.gradients.send(x.grad, self.comm.rank - 1, async_op=True))


class FloatsAlone(pipeline.Stage):
    def forward(self, k, x, target):
        super().forward(k, x if x is None else x.to(self.dtype), target)


def gathers_the_table(comm, tokens, w):
    whole = autograd.gather_tokens(comm, w[None])[0]
    return torch.nn.functional.embedding(tokens, whole)


def by_rows_alone(right):
    """Only rows that are in no file are noticed."""

    def wrong(boxes, load, wanted):
        (begin, end), _ = wanted
        rows = {row for (first, last), _ in boxes for row in range(first, last)}
        if not set(range(begin, end)) <= rows:
            raise ValueError("rows are missing")
        try:
            return right(boxes, load, wanted)
        except ValueError:
            (begin, end), (left, last) = wanted
            return torch.zeros(end - begin, last - left, dtype=torch.float64)

    return wrong


def nearest_first(comm, x, root):
    """Right: distances 1, 2, 4 in place of 4, 2, 1."""
    p, place, y, distance = comm.size, (comm.rank - root) % comm.size, x.clone(), 1
    while distance < p:
        if place < distance and place + distance < p:
            comm.send(y, (place + distance + root) % p)
        elif distance <= place < 2 * distance:
            y = comm.recv(x.shape, x.dtype, (place - distance + root) % p)
        distance *= 2
    return y


def along_a_chain(comm, x, root):
    place = (comm.rank - root) % comm.size
    y = x.clone() if place == 0 else comm.recv(x.shape, x.dtype, (comm.rank - 1) % comm.size)
    if place < comm.size - 1:
        comm.send(y, (comm.rank + 1) % comm.size)
    return y


LATEST, FIRST = {"of the latest call": latest}, {"of the first group": first_group}
DY = {"dy is zeroed": returned(ZeroesDy.apply)}


def each(right, mistakes):
    return {name: mistake(right) for name, mistake in mistakes.items()}


WRONG = {
    "mlp": each(tensor_parallel.mlp, LATEST | DY),
    "attention": each(partial(tensor_parallel.attention, head_dim=4), LATEST | DY),
    "sequence_parallel": each(sequence_parallel.block, LATEST | DY),
    "vocab_embedding": {**each(vocab.embedding, LATEST | FIRST | DY), "the whole table": gathers_the_table},
    "vocab_loss": each(vocab.cross_entropy, LATEST | FIRST | {"targets": writes(1, lambda x: x.sub_(1))}),
    "ring_attention": {
        **each(ring_attention.ring_attention, LATEST | FIRST | DY),
        "full by default": full_by_default,
    },
    "ulysses_attention": each(ulysses.ulysses_attention, LATEST | FIRST | DY),
    "dispatch": each(
        dispatch.dispatch, LATEST | FIRST | DY | {"counts": writes(1, torch.zero_), "half counts": halved}
    ),
    "global_loss": {
        **each(
            global_loss.global_loss,
            LATEST | {"targets": writes(1, lambda x: x.sub_(1)), "half counts": halved},
        ),
        "returns early": returns_early,
    },
    "grad_norm": {
        "copies": writes(1, lambda copies: copies.clear())(grad_norm.grad_norm),
    },
    "all_to_all": {
        "sizes": writes(2, lambda sizes: sizes.__setitem__(0, 0))(collectives.all_to_all),
        "of the first group": first_group(collectives.all_to_all),
    },
    **{
        name: {"of the first group": first_group(getattr(collectives, name))}
        for name in ("all_gather", "reduce_scatter")
    },
    "halving_doubling": {
        "wrong for six and seven": returned(lambda y: y * 2, lambda comm, *args: comm.size in (6, 7))(
            halving_doubling.all_reduce
        )
    },
    "broadcast": {"along a chain": along_a_chain},
    "reshard": {"by rows alone": by_rows_alone(reshard.reshard)},
    "ddp": {
        "of the class": OfTheClass,
        "no order": LargestFirst,
        "frozen as they are": frozen_as_they_are,
    },
    "average_gradients": {"each layer": average_of_each_layer},
    "zero1": {"two options": TwoOptions, "of the class": ShardsOfTheClass},
    "fsdp": {"first gradient": FirstGradientFSDP, "whole after evaluation": WholeAfterEvaluation},
    "pipeline_gpipe": {
        "floats alone": steps(lambda p, rank, m: [*range(m), *(-1 - k for k in range(m))], FloatsAlone),
        "one after another": steps(one_after_another),
    },
    "pipeline_one_f_one_b": {
        "one after another": steps(one_after_another),
        "keeps graphs": steps(one_f_one_b, KeepsGraphs),
    },
}
RIGHT = {
    "broadcast": {"nearest first": nearest_first},
    "pipeline_one_f_one_b": {"another loop": steps(one_f_one_b)},
}
