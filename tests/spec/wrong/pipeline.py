"""Wrong and unusual pipelines: steps on ranks, and schedules as data."""

import dataclasses

import torch

from minipar.schedules import Action, Schedule, gpipe, one_f_one_b, zb_h1
from minipar.simple import pipeline
from tests.spec.wrong.generic import nan_as_zero


def arguments(change):
    """`change(step)` returns other (inputs, targets, m, ...)."""

    def mistake(right):
        def wrong(comm, module, loss_fn, inputs, targets, m, shape, dtype):
            return right(*change(comm, module, loss_fn, inputs, targets, m, shape, dtype))

        return wrong

    return mistake


def after(change):
    """`change(comm, module, loss, m)` returns the loss, and may change gradients."""

    def mistake(right):
        def wrong(comm, module, loss_fn, inputs, targets, m, shape, dtype):
            loss = right(comm, module, loss_fn, inputs, targets, m, shape, dtype)
            return change(comm, module, loss, m)

        return wrong

    return mistake


def scaled(factor):
    def change(comm, module, loss, m):
        f = factor(comm, m)
        for p in module.parameters():
            if p.grad is not None:
                p.grad.mul_(f)
        return loss

    return after(change)


def through(change):
    """What a stage computes is changed, except the last stage's."""

    class Stage(torch.nn.Module):
        def __init__(self, module, last):
            super().__init__()
            self.module, self.last = module, last

        def forward(self, x):
            y = self.module(x)
            return y if self.last else change(y)

    return arguments(lambda comm, module, *args: (comm, Stage(module, comm.rank == comm.size - 1), *args))


def overwrites(right):
    def wrong(comm, module, *args):
        for p in module.parameters():
            p.grad = None
        return right(comm, module, *args)

    return wrong


def first_batch_again(right):
    kept = {}

    def wrong(comm, module, loss_fn, inputs, targets, m, shape, dtype):
        inputs, targets = kept.setdefault((comm.size, m, tuple(shape)), (inputs, targets))
        return right(comm, module, loss_fn, inputs, targets, m, shape, dtype)

    return wrong


def loss_of_the_last_microbatch(right):
    def wrong(comm, module, loss_fn, inputs, targets, m, shape, dtype):
        losses = []

        def keeping(y, target):
            losses.append(loss_fn(y, target))
            return losses[-1]

        loss = right(comm, module, keeping, inputs, targets, m, shape, dtype)
        return None if loss is None else losses[-1].detach()

    return wrong


def fewer_than_ranks(right):
    def wrong(comm, module, loss_fn, inputs, targets, m, shape, dtype):
        loss = right(comm, module, loss_fn, inputs, targets, m, shape, dtype)
        if m < comm.size:
            for p in module.parameters():
                p.grad.zero_()
        return loss

    return wrong


def ignores_batch_strides(right):
    def dense(x):
        if x is None or x.is_contiguous():
            return x
        return x.as_strided(x.shape, torch.empty(x.shape).stride())

    def wrong(comm, module, loss_fn, inputs, targets, m, shape, dtype):
        return right(comm, module, loss_fn, dense(inputs), dense(targets), m, shape, dtype)

    return wrong


STEPS = {
    "activations through float32": through(lambda y: y.float().to(y.dtype)),
    "activations zero from 1,000 elements on": through(lambda y: y if y.numel() < 1000 else y * 0),
    "activations are positive": through(torch.relu),
    "wrong in float32": through(lambda y: y * 2 if y.dtype == torch.float32 else y),
    "wrong in bfloat16": through(lambda y: y * 2 if y.dtype == torch.bfloat16 else y),
    "nan is zero": through(nan_as_zero),
    "wrong from five ranks on": scaled(lambda comm, m: 2 if comm.size >= 5 else 1),
    "wrong from eight microbatches on": scaled(lambda comm, m: 2 if m >= 8 else 1),
    "divides by m twice": scaled(lambda comm, m: 1 / m),
    "sums": scaled(lambda comm, m: m),
    "overwrites .grad": overwrites,
    "the first batch again": first_batch_again,
    "the loss of the last microbatch": loss_of_the_last_microbatch,
    "the loss times m": after(lambda comm, module, loss, m: None if loss is None else loss * m),
    "a loss on every rank": after(lambda comm, module, loss, m: torch.zeros(()) if loss is None else loss),
    "no loss": after(lambda comm, module, loss, m: None),
    "zero with fewer microbatches than ranks": fewer_than_ranks,
    "ignores strides": ignores_batch_strides,
}


def in_own_memory(right):
    """Right: the batch is copied first."""

    def step(comm, module, loss_fn, inputs, targets, m, shape, dtype):
        inputs, targets = (None if x is None else x.detach().clone() for x in (inputs, targets))
        return right(comm, module, loss_fn, inputs, targets, m, shape, dtype)

    return step


# Schedules --------------------------------------------------------------------------------


def every(change, when=lambda p, m: True):
    """Each rank's actions are changed."""

    def mistake(right):
        def wrong(p, m):
            schedule = right(p, m)
            if not when(p, m):
                return schedule
            actions = tuple(tuple(change(rank, list(own))) for rank, own in enumerate(schedule.actions))
            return dataclasses.replace(schedule, actions=actions)

        return wrong

    return mistake


def swapped_backwards(rank, own):
    """The microbatches' backwards in the reverse order of those."""
    backwards = [i for i, a in enumerate(own) if a.op != "F"]
    out = list(own)
    for i, j in zip(backwards, reversed(backwards)):
        out[i] = own[j]
    return out


def first_again(rank, own):
    return [own[0], *own]


def without_last(rank, own):
    return own[:-1]


def one_further(rank, own):
    return [a._replace(microbatch=a.microbatch + 1) for a in own]


def accepts(value, only_m=False):
    def mistake(right):
        def wrong(p, m):
            if m == value or (p == value and not only_m):
                return Schedule(tuple(() for _ in range(max(p, 0))), tuple(range(max(p, 0))), max(m, 0), "x")
            return right(p, m)

        return wrong

    return mistake


def fields(**changes):
    return lambda right: (
        lambda p, m: dataclasses.replace(right(p, m), **{k: v(p, m) for k, v in changes.items()})
    )


def one_at_a_time(split):
    def mistake(right):
        def wrong(p, m):
            ops = ("F", *split)
            actions = tuple(tuple(Action(op, r, k) for k in range(m) for op in ops) for r in range(p))
            return Schedule(actions, tuple(range(p)), m, "serial")

        return wrong

    return mistake


def stages_backwards(right):
    def wrong(p, m):
        schedule = right(p, m)
        return dataclasses.replace(schedule, actions=schedule.actions[::-1])

    return wrong


def capped(right):
    """From 17 microbatches on, those of 16."""
    return lambda p, m: right(p, min(m, 16))


def five_is_four(right):
    return lambda p, m: right(p if p < 5 else 4, m)


def once(right):
    kept = {}
    return lambda p, m: kept.setdefault(p, right(p, m))


def schedules(split):
    return {
        "actions missing": every(without_last),
        "an action twice": every(first_again),
        "microbatches from 1 on": every(one_further),
        "the neighbour's actions": stages_backwards,
        "an action missing from 9 microbatches on": every(without_last, lambda p, m: m >= 9),
        "16 microbatches at most": capped,
        "four ranks at most": five_is_four,
        "accepts no microbatch": accepts(0, only_m=True),
        "accepts no rank": accepts(0),
        "accepts a negative number": accepts(-1),
        "stages backwards": fields(stage_rank=lambda p, m: tuple(reversed(range(p)))),
        "another number of microbatches": fields(num_microbatches=lambda p, m: m + 1),
        "one microbatch at a time": one_at_a_time(split),
        "the first m again": once,
    }


def dataless(right):
    """Right: built again from lists."""

    def schedule(p, m):
        s = right(p, m)
        return Schedule(
            tuple(tuple(Action(*a) for a in own) for own in s.actions), tuple(s.stage_rank), m, "mine"
        )

    return schedule


def made(mistakes, right):
    return {name: mistake(right) for name, mistake in mistakes.items()}


SCHEDULES = {"schedule_gpipe": gpipe, "schedule_1f1b": one_f_one_b, "schedule_zb_h1": zb_h1}
WRONG = {
    "pipeline_gpipe": made(STEPS, pipeline.gpipe),
    "pipeline_one_f_one_b": made(STEPS, pipeline.one_f_one_b),
    **{
        name: made(schedules("IW" if name == "schedule_zb_h1" else "B"), right)
        for name, right in SCHEDULES.items()
    },
}
for name in ("schedule_1f1b", "schedule_zb_h1"):
    WRONG[name]["backwards reversed from five ranks on"] = every(swapped_backwards, lambda p, m: p >= 5)(
        SCHEDULES[name]
    )
RIGHT = {
    "pipeline_gpipe": {"in its own memory": in_own_memory(pipeline.gpipe)},
    "pipeline_one_f_one_b": {"in its own memory": in_own_memory(pipeline.one_f_one_b)},
    "schedule_gpipe": {"built again": dataless(gpipe), "backwards reversed": every(swapped_backwards)(gpipe)},
    "schedule_1f1b": {"built again": dataless(one_f_one_b)},
    "schedule_zb_h1": {"built again": dataless(zb_h1)},
}
