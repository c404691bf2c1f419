"""Wrong and unusual data parallelism: DDP, ZeRO, FSDP, the loss and the norm over all ranks."""

import torch
import torch.nn.functional as F

from minipar.simple import ddp, fsdp, global_loss, grad_norm, zero
from tests.spec.wrong.generic import (
    OnesFromAbove,
    Replaced,
    float64_as_float32,
    ignores_strides,
    ignores_the_gradient_from_above,
    nan_as_zero,
    stale,
    with_dense_strides,
    writes_to_the_first,
    wrong_from_five_ranks_on,
    wrong_in_bfloat16,
    wrong_in_float32,
    zero_from_1000_elements_on,
)


class Handle:
    def __init__(self, handle, change):
        self.handle, self.change = handle, change

    def wait(self):
        return self.change(self.handle.wait())


def on_comm(cls, change):
    """The class `cls`, which is given another Comm."""
    if cls is ddp.DDP:

        class Wrong(cls):
            def __init__(self, module, comm, bucket_mb=25.0):
                super().__init__(module, change(comm), bucket_mb)

    elif cls is fsdp.FSDP:

        class Wrong(cls):
            def __init__(self, module, comm, unit_class):
                super().__init__(module, change(comm), unit_class)

    else:

        class Wrong(cls):
            def __init__(self, params, optimizer_cls, comm, **options):
                super().__init__(params, optimizer_cls, change(comm), **options)

    return Wrong


def with_comm(cls, given=None, result=None, only=("all_reduce", "reduce_scatter")):
    """The class `cls`, whose collectives are given something else, or return something else."""

    def changed(comm, name):
        def collective(x, *args, async_op=False, **options):
            y = getattr(comm, name)(given(comm, x) if given else x, *args, async_op=async_op, **options)
            if result is None:
                return y
            return Handle(y, lambda y: result(comm, y)) if async_op else result(comm, y)

        return collective

    return on_comm(cls, lambda comm: Replaced(comm, **{name: changed(comm, name) for name in only}))


def float64_sums_as_float32(comm, x):
    return x.float().to(x.dtype) if x.dtype == torch.float64 else x


def nan_out(comm, x):
    return nan_as_zero(x) if x.is_floating_point() else x


def first_1000_only(comm, y):
    y = y.clone()
    y.view(-1)[1000:] = 0
    return y


def wrong_from_five(comm, y):
    return y * 2 if comm.size >= 5 else y


def double_in(dtype):
    return lambda comm, y: y * 2 if y.dtype == dtype else y


def by_one_rank_less(comm, y):
    return y * comm.size / max(1, comm.size - 1)


def no_division(comm, y):
    return y * comm.size


GRADIENTS = {  # of anything that averages gradients
    "float64 as float32": dict(given=float64_sums_as_float32),
    "zero beyond 1,000 elements": dict(result=first_1000_only),
    "wrong from five ranks on": dict(result=wrong_from_five),
    "wrong in float32": dict(result=double_in(torch.float32)),
    "wrong in bfloat16": dict(result=double_in(torch.bfloat16)),
    "nan is zero": dict(given=nan_out),
    "divides by one rank less": dict(result=by_one_rank_less),
    "sums": dict(result=no_division),
}


def broadcasts_nothing(cls):
    return on_comm(cls, lambda comm: Replaced(comm, broadcast=lambda x: x))


# DDP --------------------------------------------------------------------------------


class NoBuffersDDP(ddp.DDP):
    """Parameters are broadcast, buffers are not."""

    def __init__(self, module, comm, bucket_mb=25.0):
        kept = [b.clone() for b in module.buffers()]
        super().__init__(module, comm, bucket_mb)
        for buffer, own in zip(module.buffers(), kept):
            buffer.data.copy_(own)


class IntegerBuffersThroughFloat32DDP(ddp.DDP):
    def __init__(self, module, comm, bucket_mb=25.0):
        super().__init__(module, comm, bucket_mb)
        for buffer in module.buffers():
            if not buffer.is_floating_point():
                buffer.data.copy_(buffer.data.float().to(buffer.dtype))


class WorksOnceDDP(ddp.DDP):
    """The buckets of the first step are taken for those of every step."""

    def forward(self, *args):
        if hasattr(self, "buckets"):
            return self.module(*args)
        return super().forward(*args)

    def _gradient_is_ready(self, param):
        if all(not bucket.pending for bucket in self.buckets):
            return
        super()._gradient_is_ready(param)


class LastBucketNotWaitedForDDP(ddp.DDP):
    def _finish(self):
        for bucket in self.buckets[:-1]:
            bucket.finish()
        self.late = self.buckets[-1].handle

    def forward(self, *args):
        if hasattr(self, "late"):
            self.late.wait()
        return super().forward(*args)


class NextStepDDP(ddp.DDP):
    """The gradients arrive one step late."""

    def _finish(self):
        super()._finish()
        mine = [p.grad for p in self.module.parameters()]
        for p, grad in zip(self.module.parameters(), getattr(self, "before", mine)):
            p.grad = grad
        self.before = mine


class ScalarsForgottenDDP(ddp.DDP):
    """A parameter of one element keeps its rank's own gradient."""

    def _finish(self):
        own = [(p, p.grad) for p in self.module.parameters() if p.numel() == 1]
        super()._finish()
        for p, grad in own:
            p.grad = grad


class StridesForgottenDDP(ddp.DDP):
    def _finish(self):
        super()._finish()
        for p in self.module.parameters():
            if not p.is_contiguous():
                p.grad = p.grad.contiguous().view(-1).flip(0).view_as(p)


class InputCutOffDDP(ddp.DDP):
    def forward(self, x):
        return super().forward(x.detach())


class OutputInFloat32DDP(ddp.DDP):
    def forward(self, x):
        y = super().forward(x)
        return y.float().to(y.dtype) if y.dtype == torch.float64 else y


class IgnoresTheLossScaleDDP(ddp.DDP):
    def forward(self, x):
        return OnesFromAbove.apply(super().forward(x))


class OneBucketDDP(ddp.DDP):
    def __init__(self, module, comm, bucket_mb=25.0):
        super().__init__(module, comm, 1e9)


class SwapsTwoBucketsDDP(ddp.DDP):
    """Odd ranks start the third bucket before the second, both in the backward."""

    def __init__(self, module, comm, bucket_mb=25.0):
        super().__init__(module, comm, bucket_mb)
        if comm.rank % 2 and len(self.groups) > 2:
            self.groups[1:3] = reversed(self.groups[1:3])


class FirstBucketAloneDDP(ddp.DDP):
    """The buckets after the first are reduced, and their sums forgotten."""

    def _finish(self):
        self.buckets[0].finish()
        for bucket in self.buckets[1:]:
            bucket.handle.wait()


class WritesToTheInputDDP(ddp.DDP):
    def forward(self, x):
        y = super().forward(x.clone())
        x.detach().mul_(2)
        return y


class DividesFirstDDP(ddp.DDP):
    """Right: each rank divides, then they add."""

    def __init__(self, module, comm, bucket_mb=25.0):
        def all_reduce(x, op, async_op):
            return comm.all_reduce(x / comm.size, async_op=async_op)

        super().__init__(module, Replaced(comm, all_reduce=all_reduce), bucket_mb)


class FinishesInReverseDDP(ddp.DDP):
    """Right: results are fetched last bucket first, and copied into the gradients that are there."""

    def _finish(self):
        for bucket in reversed(self.buckets):
            sums = bucket.handle.wait().split([p.numel() for p in bucket.params])
            for param, grad in zip(bucket.params, sums):
                param.grad.copy_(grad.view_as(param))


# Average_gradients --------------------------------------------------------------------------------


def averaging(change):
    def wrong(module, comm):
        for p in module.parameters():
            p.grad = change(comm, p.grad, comm.all_reduce(p.grad, "mean"))

    return wrong


def average_but_the_last(module, comm):
    *params, last = module.parameters()
    for p in params:
        p.grad = comm.all_reduce(p.grad, "mean")
    comm.all_reduce(last.grad)


def average_not_fetched(module, comm):
    handles = [comm.all_reduce(p.grad, "mean", async_op=True) for p in module.parameters()]
    for handle in handles:
        handle.wait()


def average_of_the_first_step():
    kept = {}

    def wrong(module, comm):
        for i, p in enumerate(module.parameters()):
            mean = comm.all_reduce(p.grad, "mean")
            p.grad = kept.setdefault((i, p.shape, comm.size), mean)

    return wrong


def average_without_scalars(module, comm):
    for p in module.parameters():
        if p.numel() > 1:
            p.grad = comm.all_reduce(p.grad, "mean")


def average_of_the_weights(module, comm):
    for p in module.parameters():
        p.grad = comm.all_reduce(p.grad, "mean")
        p.data.copy_(comm.broadcast(p.data))


def average_backwards(module, comm):
    """Right: the last parameter first, in one's own memory."""
    for p in reversed(list(module.parameters())):
        p.grad.copy_(comm.all_reduce(p.grad.clone() / comm.size))


def average_all_at_once(module, comm):
    """Right: one collective for all."""
    params = list(module.parameters())
    flat = comm.all_reduce(torch.cat([p.grad.flatten() for p in params]), "mean")
    for p, grad in zip(params, flat.split([p.numel() for p in params])):
        p.grad = grad.view_as(p)


# ZeRO --------------------------------------------------------------------------------


def zeros(cls):
    class DropsTheTail(cls):
        """Elements that p does not divide are left as they are."""

        @torch.no_grad()
        def step(self):
            n = self.comm.size
            before = [p.detach().clone().view(-1)[p.numel() // n * n :] for p in self.params]
            super().step()
            for p, tail in zip(self.params, before):
                if len(tail) and p.is_contiguous():
                    p.view(-1)[-len(tail) :] = tail

    class ForgetsNothing(cls):
        def zero_grad(self):
            pass

    class ForgetsTheState(cls):
        """A new optimizer each step."""

        def __init__(self, params, optimizer_cls, comm, **options):
            super().__init__(params, optimizer_cls, comm, **options)
            self.make = lambda: optimizer_cls(self.shards, **options)

        def step(self):
            self.optimizer = self.make()
            super().step()

    class GathersTheFirstStep(cls):
        def step(self):
            if hasattr(self, "done"):
                before = [p.detach().clone() for p in self.params]
                super().step()
                for p, old in zip(self.params[1:], before[1:]):
                    p.data.copy_(old)
            else:
                super().step()
            self.done = True

    class ScalarsStay(cls):
        """A parameter of one element is updated on rank 0 alone."""

        def step(self):
            before = [p.detach().clone() for p in self.params]
            super().step()
            if self.comm.rank:
                for p, old in zip(self.params, before):
                    if p.numel() == 1:
                        p.data.copy_(old)

    class NeighboursShard(cls):
        """The parts are put together one rank further."""

        def __init__(self, params, optimizer_cls, comm, **options):
            def all_gather(x):
                whole = comm.all_gather(x)
                return (
                    whole
                    if comm.size < 3
                    else torch.cat([*whole.chunk(comm.size)[1:], whole.chunk(comm.size)[0]])
                )

            super().__init__(params, optimizer_cls, Replaced(comm, all_gather=all_gather), **options)

    class StridesForgotten(cls):
        def step(self):
            super().step()
            for p in self.params:
                if not p.is_contiguous():
                    p.data.copy_(p.data.contiguous().view(p.data.t().shape).t())

    class GathersBackwards(cls):
        """Right: the last parameter is gathered first."""

        @torch.no_grad()
        def step(self):
            for p, shard in reversed(list(zip(self.params, self.shards))):
                shard.grad = self.gradient_shard(p)
            self.optimizer.step()
            for p, shard in reversed(list(zip(self.params, self.shards))):
                p.copy_(self.comm.all_gather(shard)[: p.numel()].view_as(p))

    wrong = {
        "no broadcast": broadcasts_nothing(cls),
        "drops the tail": DropsTheTail,
        "forgets no gradient": ForgetsNothing,
        "forgets the state": ForgetsTheState,
        "gathers in the first step": GathersTheFirstStep,
        "scalars on rank 0 alone": ScalarsStay,
        "the neighbour's shard": NeighboursShard,
        "ignores strides": StridesForgotten,
        **{name: with_comm(cls, **change) for name, change in GRADIENTS.items()},
    }
    if cls is zero.Zero2:
        wrong["frees the gradient only in step"] = LateZero2
    return wrong, {"gathers backwards": GathersBackwards}


class LateZero2(zero.Zero2):
    """Keeps the whole gradient until the step."""

    def reduce_now(self, p):
        kept = p.grad
        super().reduce_now(p)
        self.kept = [*getattr(self, "kept", []), kept]

    def zero_grad(self):
        self.kept = []
        super().zero_grad()


# FSDP --------------------------------------------------------------------------------


def unit_with(**methods):
    """FSDP whose units have other methods: name=function(unit, right method, *args)."""

    class Wrong(fsdp.FSDP):
        def __init__(self, module, comm, unit_class):
            super().__init__(module, comm, unit_class)
            for unit in self.units:
                for name, other in methods.items():
                    right = getattr(unit, name)
                    setattr(unit, name, lambda *args, u=unit, o=other, right=right: o(u, right, *args))

    return Wrong


def gather_then(change):
    def gather(unit, right):
        right()
        with torch.no_grad():
            change(unit)

    return unit_with(gather=gather)


def reduced_then(change):
    """Hooks keep the unit's own method, so the collective is replaced."""
    return with_comm(fsdp.FSDP, result=change, only=("reduce_scatter",))


class OverwritesFSDP(fsdp.FSDP):
    def forward(self, x):
        for unit in self.units:
            unit.shard.grad = None
        return super().forward(x)


class PiecewiseFSDP(fsdp.FSDP):
    """Right: the gathers are broadcasts of each rank's shard."""

    def __init__(self, module, comm, unit_class):
        def all_gather(x):
            return comm.all_gather(x.clone().contiguous())

        def reduce_scatter(x, op):
            return comm.reduce_scatter(x / comm.size)

        super().__init__(
            module, Replaced(comm, all_gather=all_gather, reduce_scatter=reduce_scatter), unit_class
        )


def neighbours(comm, y):
    return y if comm.size < 3 else torch.cat([*y.chunk(comm.size)[1:], y.chunk(comm.size)[0]])


# The loss and the norm over all ranks --------------------------------------------------------------------------------


def loss(counted):
    def wrong(comm, logits, targets):
        n = counted(comm, targets)
        return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / n

    return wrong


def loss_without_max(comm, logits, targets):
    n = comm.all_reduce((targets != -100).sum())
    kept = targets != -100
    z = logits[kept]
    return (z.exp().sum(1).log() - z.gather(1, targets[kept][:, None])[:, 0]).sum() / n


def loss_that_ignores_0(comm, logits, targets):
    n = comm.all_reduce((targets != -100).sum())
    return (
        F.cross_entropy(logits, targets.masked_fill(targets == -100, 0), ignore_index=0, reduction="sum") / n
    )


def loss_that_fails_on_nothing(comm, logits, targets):
    if (targets == -100).all():
        raise IndexError("no target")
    return global_loss.global_loss(comm, logits, targets)


def loss_zero_where_nothing(comm, logits, targets):
    n = comm.all_reduce((targets != -100).sum())
    if (targets == -100).all():
        return torch.zeros((), dtype=logits.dtype)  # no graph: its backward fails
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / n


def loss_by_hand(comm, logits, targets):
    """Right: log-softmax, gathered and masked."""
    n = comm.all_reduce((targets != -100).sum()[None])[0]
    kept = targets != -100
    at = logits.log_softmax(1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return -(at * kept).sum() / n


def norm(change=lambda g: g, of=lambda total: total, copies=lambda n, comm: n):
    def wrong(comm, grads, counts):
        return of(grad_norm.grad_norm(comm, [change(g) for g in grads], [copies(n, comm) for n in counts]))

    return wrong


def norm_in_float32(comm, grads, copies):
    total = sum((g.float().square().sum() / n for g, n in zip(grads, copies)), torch.zeros(()))
    return comm.all_reduce(total.double()).sqrt()


def norm_of_norms(comm, grads, copies):
    total = sum((g.double().norm() / n for g, n in zip(grads, copies)), torch.zeros((), dtype=torch.float64))
    return comm.all_reduce(total)


def norm_that_fails_without_gradients(comm, grads, copies):
    grads[0]
    return grad_norm.grad_norm(comm, grads, copies)


def norm_rank_0s(comm, grads, copies):
    y = grad_norm.grad_norm(comm, grads, copies)
    return y if comm.rank == 0 else y * 0


def norm_without_scalars(comm, grads, copies):
    pairs = [(g, n) for g, n in zip(grads, copies) if g.numel() > 1]
    return grad_norm.grad_norm(comm, [g for g, _ in pairs], [n for _, n in pairs])


def norm_twice_over():
    kept = []

    def wrong(comm, grads, copies):
        kept.append(
            sum(
                (g.double().square().sum() / n for g, n in zip(grads, copies)),
                torch.zeros((), dtype=torch.float64),
            )
        )
        return comm.all_reduce(sum(kept)).sqrt()

    return wrong


def norm_ignores_strides(comm, grads, copies):
    return grad_norm.grad_norm(
        comm, [g if g.is_contiguous() else g.as_strided((g.numel(),), (1,)) for g in grads], copies
    )


def norm_by_vectors(comm, grads, copies):
    """Right: one vector of all gradients, scaled by 1/sqrt(copies)."""
    parts = [g.detach().double().reshape(-1) / n**0.5 for g, n in zip(grads, copies)]
    own = torch.cat([torch.zeros(1, dtype=torch.float64), *parts])
    return comm.all_reduce(own.dot(own)).sqrt()


ZERO1, RIGHT_ZERO1 = zeros(zero.Zero1)
ZERO2, RIGHT_ZERO2 = zeros(zero.Zero2)
WRONG = {
    "ddp": {
        **{name: with_comm(ddp.DDP, **change) for name, change in GRADIENTS.items()},
        "no broadcast": broadcasts_nothing(ddp.DDP),
        "no broadcast of buffers": NoBuffersDDP,
        "integer buffers through float32": IntegerBuffersThroughFloat32DDP,
        "works once": WorksOnceDDP,
        "last bucket not waited for": LastBucketNotWaitedForDDP,
        "gradients of the step before": NextStepDDP,
        "scalars forgotten": ScalarsForgottenDDP,
        "ignores strides": StridesForgottenDDP,
        "cuts off the input": InputCutOffDDP,
        "output as float32": OutputInFloat32DDP,
        "ignores the gradient from above": IgnoresTheLossScaleDDP,
        "one bucket": OneBucketDDP,
        "swaps two buckets": SwapsTwoBucketsDDP,
        "first bucket alone": FirstBucketAloneDDP,
        "writes to the input": WritesToTheInputDDP,
    },
    "average_gradients": {
        "float64 as float32": averaging(
            lambda comm, own, mean: comm.all_reduce(own.float(), "mean").to(own.dtype)
        ),
        "zero beyond 1,000 elements": averaging(lambda comm, own, mean: first_1000_only(comm, mean)),
        "wrong from five ranks on": averaging(lambda comm, own, mean: wrong_from_five(comm, mean)),
        "wrong in float32": averaging(lambda comm, own, mean: double_in(torch.float32)(comm, mean)),
        "wrong in bfloat16": averaging(lambda comm, own, mean: double_in(torch.bfloat16)(comm, mean)),
        "nan is zero": averaging(lambda comm, own, mean: nan_as_zero(mean)),
        "divides by one rank less": averaging(lambda comm, own, mean: by_one_rank_less(comm, mean)),
        "but the last": average_but_the_last,
        "result not fetched": average_not_fetched,
        "the first step's": average_of_the_first_step(),
        "scalars forgotten": average_without_scalars,
        "ignores strides": averaging(
            lambda comm, own, mean: comm.all_reduce(with_dense_strides(own), "mean")
        ),
    },
    "zero1": ZERO1,
    "zero2": ZERO2,
    "fsdp": {
        **{name: with_comm(fsdp.FSDP, **change) for name, change in GRADIENTS.items()},
        "no broadcast": broadcasts_nothing(fsdp.FSDP),
        "gathers through float32": with_comm(fsdp.FSDP, given=float64_sums_as_float32, only=("all_gather",)),
        "gathers zero beyond 1,000 elements": with_comm(
            fsdp.FSDP, result=first_1000_only, only=("all_gather",)
        ),
        "gathers wrong from five ranks on": with_comm(
            fsdp.FSDP, result=wrong_from_five, only=("all_gather",)
        ),
        "gathers the neighbour's": with_comm(fsdp.FSDP, result=neighbours, only=("all_gather",)),
        "overwrites the first backward's": OverwritesFSDP,
    },
    "global_loss": {
        "float64 as float32": float64_as_float32(global_loss.global_loss),
        "zero from 1,000 elements on": zero_from_1000_elements_on(global_loss.global_loss),
        "wrong from five ranks on": wrong_from_five_ranks_on(global_loss.global_loss),
        "wrong in bfloat16": wrong_in_bfloat16(global_loss.global_loss),
        "wrong in float32": wrong_in_float32(global_loss.global_loss),
        "ignores strides": ignores_strides(global_loss.global_loss),
        "ignores the gradient from above": ignores_the_gradient_from_above(global_loss.global_loss),
        "stale": stale(global_loss.global_loss),
        "writes to the logits": writes_to_the_first(global_loss.global_loss),
        "the rank's own count": loss(lambda comm, targets: (targets != -100).sum() * comm.size),
        "counts what does not count": loss(lambda comm, targets: comm.all_reduce(torch.tensor(len(targets)))),
        "without the maximum": loss_without_max,
        "class 0 does not count": loss_that_ignores_0,
        "fails where nothing counts": loss_that_fails_on_nothing,
        "no graph where nothing counts": loss_zero_where_nothing,
        "nan is zero": lambda comm, logits, targets: global_loss.global_loss(
            comm, nan_as_zero(logits), targets
        ),
    },
    "grad_norm": {
        "squares in float32": norm_in_float32,
        "zero from 1,000 elements on": norm(lambda g: g if g.numel() < 1000 else g * 0),
        "wrong from five ranks on": wrong_from_five_ranks_on(grad_norm.grad_norm),
        "nan is zero": norm(nan_as_zero),
        "infinities are zero": norm(lambda g: torch.where(g.isinf(), torch.zeros_like(g), g)),
        "wrong in bfloat16": norm(lambda g: g * 2 if g.dtype == torch.bfloat16 else g),
        "float64 as float32": norm(lambda g: g.float()),
        "ignores copies": norm(copies=lambda n, comm: 1),
        "copies are all or one": norm(copies=lambda n, comm: comm.size if n > 1 else 1),
        "a sum of norms": norm_of_norms,
        "returns float32": norm(of=lambda y: y.float()),
        "fails without gradients": norm_that_fails_without_gradients,
        "right on rank 0 alone": norm_rank_0s,
        "scalars forgotten": norm_without_scalars,
        "adds up over calls": norm_twice_over(),
        "ignores strides": norm_ignores_strides,
    },
}
RIGHT = {
    "ddp": {"divides first": DividesFirstDDP, "finishes in reverse": FinishesInReverseDDP},
    "average_gradients": {"last first": average_backwards, "all at once": average_all_at_once},
    "zero1": RIGHT_ZERO1,
    "zero2": RIGHT_ZERO2,
    "fsdp": {"divides first": PiecewiseFSDP},
    "global_loss": {"by hand": loss_by_hand},
    "grad_norm": {"one vector": norm_by_vectors},
}
WORDS = {
    "ddp": {
        "one bucket": "nothing is sent before the last gradient",
        "swaps two buckets": r"is wrong.*with a bucket for each layer; .*started in the same order",
        "first bucket alone": "with a bucket for each layer; is every bucket reduced",
    },
}
