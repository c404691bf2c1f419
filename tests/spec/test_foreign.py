"""Foreign code that is wrong is called wrong, in words for its fault; adapters of right code are called right."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from minipar.simple import autograd
from minipar.spec import check, conventions

ADAPTERS = Path(__file__).parents[2] / "docs" / "adapters"


def all_reduce(comm, x):
    y = x.clone()
    dist.all_reduce(y, group=comm.process_group())
    return y


def twice(comm, x):
    return all_reduce(comm, all_reduce(comm, x))


def gathered_and_added(comm, x):
    whole = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(comm.size)]
    dist.all_gather(whole, x.contiguous(), group=comm.process_group())
    return torch.stack(whole).sum(0)


def sent_to_each(comm, x):
    whole = [x.contiguous() if r == comm.rank else torch.empty_like(x).contiguous() for r in range(comm.size)]
    for r, y in enumerate(whole):
        dist.broadcast(y, group_src=r, group=comm.process_group())
    return torch.stack(whole).sum(0)


def all_but_the_last(module, comm):
    for p in list(module.parameters())[:-1]:
        p.grad = all_reduce(comm, p.grad) / comm.size


def ddp_that_ignores_one(module, comm, bucket_mb=25.0):
    for p in module.parameters():
        dist.broadcast(p.data, group_src=0, group=comm.process_group())
    name = next(name for name, _ in module.named_parameters())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [name])
    return DistributedDataParallel(module, process_group=comm.process_group(), bucket_cap_mb=bucket_mb)


class ByHand(nn.Module):
    """DDP with a blocking all_reduce for each parameter, in the order of a chain's backward."""

    def __init__(self, module, comm, bucket_mb=25.0):
        super().__init__()
        self.module, self.group = module, comm.process_group()
        for p in module.parameters():
            dist.broadcast(p.data, group_src=0, group=self.group)

    def forward(self, x):
        return self.module(x)

    def average(self, p):
        dist.all_reduce(p.grad, group=self.group)
        p.grad /= dist.get_world_size(self.group)


class AtTheEnd(ByHand):
    """What it sends before the last gradient is there is a broadcast in its forward."""

    def forward(self, x):
        dist.broadcast(torch.zeros(1), group_src=0, group=self.group)
        return self.module(x)

    def finish_gradients(self):
        for p in self.module.parameters():
            self.average(p)


class InHooks(ByHand):
    """Each hook waits for its all_reduce."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for p in self.module.parameters():
            p.register_post_accumulate_grad_hook(self.average)


class InFunctionalHooks(InHooks):
    def average(self, p):
        p.grad = functional.all_reduce(p.grad, "sum", self.group).wait()
        p.grad /= dist.get_world_size(self.group)


def gathers_weights(comm, x, gate, up, down):
    mesh = DeviceMesh.from_group(comm.process_group(), "cpu")
    parts = ((gate, 0), (up, 0), (down, 1))
    gate, up, down = (DTensor.from_local(w, mesh, [Shard(dim)]).full_tensor() for w, dim in parts)
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def one_unit(module, comm, unit_class):
    for p in module.parameters():
        dist.broadcast(p.data, group_src=0, group=comm.process_group())
    return fully_shard(module, mesh=DeviceMesh.from_group(comm.process_group(), "cpu"))


@conventions("header", "p microbatches or more")
def all_forwards_first(comm, module, loss_fn, inputs, targets, m, shape, dtype):
    x = torch.empty(shape, dtype=dtype).requires_grad_()
    stage = PipelineStage(
        module, comm.rank, comm.size, comm.device, input_args=x, output_args=x, group=comm.process_group()
    )
    losses = []
    schedule = ScheduleGPipe(stage, m, loss_fn=lambda y, t: loss_fn(y, t) / m, scale_grads=False)
    schedule.step(*(() if inputs is None else (inputs,)), target=targets, losses=losses)
    return sum(loss.detach() for loss in losses) if losses else None


WRONG = [
    ("all_reduce", twice, None, "summed twice|added more than once|times"),
    (
        "all_reduce",
        gathered_and_added,
        None,
        r"it sent \d+ bytes \(torch's all_gather as a ring \d+\); a ring sends",
    ),
    ("all_reduce", sent_to_each, ["bytes"], "torch's broadcast as a binomial tree"),
    ("average_gradients", all_but_the_last, None, "gradient of last.bias"),
    ("ddp", ddp_that_ignores_one, ["small"], "first.weight"),
    ("ddp", AtTheEnd, ["order"], "nothing is sent before the last gradient"),
    ("ddp", InHooks, ["order"], "waits before the last gradient"),
    ("ddp", InFunctionalHooks, ["order"], "waits before the last gradient"),
    ("mlp", gathers_weights, ["bytes"], "torch's all_gather as a ring"),
    ("fsdp", one_unit, ["memory"], "units of .* bytes are not freed"),
    (
        "pipeline_one_f_one_b",
        all_forwards_first,
        ["drawn"],
        "microbatches are alive at once; this order needs",
    ),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "wrong", "stages", "words"), WRONG, ids=[wrong.__name__ for _, wrong, *_ in WRONG]
)
def test_wrong_foreign_code_is_called_wrong(name, wrong, stages, words):
    report = check(name, wrong, stages)
    assert report.first_wrong is not None, "it was called right"
    assert re.search(words, report.first_wrong.words), str(report)


def on_the_default_group(comm, x):
    y = x.clone()
    dist.all_reduce(y)
    return y


class SumsGradientsOnTheDefaultGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return on_the_default_group(None, dy)


def copy_on_the_default_group(comm, x, gate, up, down):
    x = SumsGradientsOnTheDefaultGroup.apply(x)
    return autograd.all_reduce(comm, F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down))


@pytest.mark.parametrize(
    ("name", "wrong"), [("all_reduce", on_the_default_group), ("mlp", copy_on_the_default_group)]
)
def test_the_default_group_of_more_ranks_is_refused_by_name(name, wrong):
    report = check("all_reduce", all_reduce, ["runs"])  # starts three ranks
    assert report.ok, str(report)
    words = str(check(name, wrong, ["drawn"]))
    assert re.search(
        r"is on a group of \d ranks, and comm has 1: pass group=comm.process_group\(\)", words
    ), words


RIGHT = [
    ("all_reduce", "collectives", None, "as a ring"),
    ("all_to_all", "collectives", None, "torch's all_to_all"),
    ("mlp", "megatron", None, "torch's all_reduce as a ring"),
    ("global_loss", "loss", None, "by convention: mean of means"),
    ("ddp", "data_parallel", ["bytes", "order"], "torch's all_reduce as a ring"),
    ("fsdp", "fsdp", ["memory"], "right, in all 1 stages"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "file", "stages", "words"), RIGHT)
def test_an_adapter_of_right_code_is_called_right(name, file, stages, words):
    report = check(name, str(ADAPTERS / f"{file}.py"), stages)
    assert report.ok, str(report)
    assert words in str(report)
